"""What happens to conversations that are longer than a sample, and what the run says about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_megatron.data.chat.encode import Encoded
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import plural

FLAG = "--overlong-samples"


@dataclass
class Overlong:
    """``keep-start`` and ``keep-end`` cut at the other end; ``drop`` leaves the conversation out. A conversation of
    which no token would count is left out, whatever the policy.

    Attributes:
        seen, cut, dropped, silent: conversations: all, cut, left out as too long, left out as nothing of them counts.
        lost: tokens that were cut off.
    """

    policy: str
    seq_length: int
    seen: int = 0
    cut: int = 0
    dropped: int = 0
    silent: int = 0
    lost: int = 0

    def fit(self, encoded: Encoded, where: str) -> Encoded | None:
        """The conversation as it is used, None if it is not. UserError for a long one with ``refuse``."""
        self.seen += 1
        ids, counts = encoded
        over = len(ids) - self.seq_length
        if over > 0:
            if self.policy == "refuse":
                raise UserError(
                    f"a conversation has {plural(len(ids), 'token')}, a sample {self.seq_length}", field=FLAG,
                    value="refuse", accepted="a longer --seq-length, keep-start, keep-end or drop", where=where,
                )  # fmt: skip
            if self.policy == "drop":
                self.dropped += 1
                return None
            kept = slice(0, self.seq_length) if self.policy == "keep-start" else slice(over, None)
            ids, counts = ids[kept], counts[kept]
            self.cut += 1
            self.lost += over
        if not np.any(counts[1:]):  # the first token of a sample is predicted by nothing
            self.silent += 1
            return None
        return Encoded(ids, counts)

    @property
    def used(self) -> int:
        return self.seen - self.dropped - self.silent

    def report(self, name: str) -> str:
        """A line about a whole data set; empty where every conversation is used as it is."""
        parts = []
        if self.cut:
            share = f"{self.cut:,} of {plural(self.seen, 'conversation')} longer than {self.seq_length} tokens"
            parts.append(f"{share} {'are' if self.cut > 1 else 'is'} cut ({plural(self.lost, 'token')} lost)")
        if self.dropped:
            parts.append(f"{plural(self.dropped, 'conversation')} longer than {self.seq_length} tokens left out")
        if self.silent:
            parts.append(f"{plural(self.silent, 'conversation')} left out: no token of the assistant is in reach")
        return f"data: {name}: {'; '.join(parts)} ({FLAG} {self.policy})" if parts else ""
