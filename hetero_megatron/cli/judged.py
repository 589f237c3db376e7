"""What is said of one word of a launch line: whether it would be honoured."""

from __future__ import annotations

from dataclasses import dataclass

HONOURED, NOTICED, REFUSED, OPEN = "honoured", "noticed", "refused", "not resolved"


@dataclass
class Judged:
    """A flag or key of a launch line, its ``values`` as in the script.

    ``reason``: why it is not honoured; ``accepted``: instead.
    """

    flag: str
    values: list[str]
    status: str
    reason: str = ""
    accepted: str = ""
