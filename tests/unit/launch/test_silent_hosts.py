"""Which hosts count as silent: one that is gone takes no slow one with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from hetero_megatron.launch.checks import silent_hosts


@dataclass
class Known:
    """Answers after so many looks; ``lost`` at once."""

    looks: int = 0
    lost: str = ""

    @property
    def facts(self) -> dict[str, Any] | None:
        self.looks -= 1
        return {} if self.looks < 0 and not self.lost else None


def silent(hosts: list[Known], seconds: float, patient: bool) -> list[int]:
    found = silent_hosts(cast(Any, hosts), seconds, patient)
    return [index for index, host in enumerate(hosts) if any(host is other for other in found)]


def test_a_slow_host_is_waited_for_beside_a_lost_one() -> None:
    assert silent([Known(), Known(lost="gone"), Known(looks=5)], 10, patient=True) == [1]
    assert silent([Known(), Known(lost="gone"), Known(looks=5)], 10, patient=False) == [1]
    assert silent([Known(), Known(looks=5)], 10, patient=True) == []
    assert silent([Known(), Known(looks=10**9), Known(lost="gone")], 0.1, patient=True) == [1, 2]
