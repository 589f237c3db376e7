"""An elastic job whose first epoch begins with other hosts than the launcher's: their agents (``launch.joining``) ask
for it as those do that join later, and start the ranks there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hetero_megatron.environment.launcher import SECRET
from hetero_megatron.environment.network import gloo_towards
from hetero_megatron.launch.jobs import LocalJob, Seat, Setup


class Agents(Protocol):
    """How the agents of the other hosts are reached."""

    @property
    def address(self) -> str | None:
        """Of the launcher's host, by which they reach it; None: there are no others."""

    def open(self, host: str, port: int, secret: str) -> None:
        """The job's store is there: they may ask."""

    def lost(self) -> dict[str, int]:
        """Exit codes of hosts, by node, of which nothing more will be heard."""

    def close(self, problem: str = "") -> None:
        """The job is over, or does not begin because of ``problem``."""


@dataclass(frozen=True)
class Attached:
    """
    Attributes:
        seats: of the first epoch.
        here: members of it that the launcher starts.
    """

    seats: tuple[Seat, ...]
    here: range
    agents: Agents

    @property
    def elsewhere(self) -> dict[str, list[int]]:
        """By node: members that its agent starts."""
        members: dict[str, list[int]] = {}
        for member in [m for m in range(len(self.seats)) if m not in self.here]:
            members.setdefault(self.seats[member].node, []).append(member)
        return members


class AttachedJob:
    """See :class:`~hetero_megatron.launch.in_place.ElasticJob`.

    Args:
        setup: of all members.
        host, port: of the job's store.
        diagnoses: where ranks of this host that lose a peer say so.
    """

    def __init__(
        self, attached: Attached, setup: Setup, words: Sequence[str], host: str, port: int, diagnoses: Path
    ) -> None:
        self._attached, here = attached, attached.here
        secret = os.environ.get(SECRET) or secrets.token_hex(32)
        self.secret = secret.encode()
        self._local: LocalJob | None = None
        if here:
            local_setup = replace(setup, seats=attached.seats[here.start : here.stop])
            more = gloo_towards(host)
            self._local = LocalJob(
                local_setup, words, host, port, 0, diagnoses, here.start, more, secret, len(attached.seats), apart=True
            )
        try:
            attached.agents.open(host, port, secret)
        except BaseException:
            self.kill()
            raise

    def poll(self) -> dict[int, int]:
        codes = self._local.poll() if self._local is not None else {}
        lost, elsewhere = self._attached.agents.lost(), self._attached.elsewhere
        return codes | {member: code for node, code in lost.items() for member in elsewhere.get(node, ())}

    def end(self, rank: int) -> None:
        """SIGKILL to one of this host."""
        assert self._local is not None
        self._local.end(rank)

    def kill(self) -> None:
        if self._local is not None:
            self._local.kill()
        self._attached.agents.close()
