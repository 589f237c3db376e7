"""The error raised when a peer does not answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class CommError(RuntimeError):
    """A transfer failed or timed out; the message names this rank, its action and the ranks it waited for.

    Attributes:
        rank: the waiting rank (None: unknown); peers: the ranks it waited for; seconds: how long; activity: its action.
        reach: state of other ranks, one of the words of ``comm.reach`` by rank.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        peers: Sequence[int] = (),
        seconds: float = 0.0,
        activity: str = "",
        reach: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.peers, self.seconds, self.activity = rank, tuple(peers), seconds, activity
        self.reach = dict(reach or {})
