"""What a rank says when a peer does not answer."""

from __future__ import annotations


class CommError(RuntimeError):
    """A transfer failed or timed out; the message names this rank, its action and the ranks it waited for."""
