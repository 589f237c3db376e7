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
        item: what a conversation is called.
        seen, cut, dropped, silent: conversations: all, cut, left out as too long, left out as nothing of them counts.
        lost: tokens that were cut off.
    """

    policy: str
    seq_length: int
    item: str = "conversation"
    seen: int = 0
    cut: int = 0
    dropped: int = 0
    silent: int = 0
    lost: int = 0

    def fit(self, encoded: Encoded, where: str) -> Encoded | None:
        """The conversation as it is used, None if it is not. UserError for a long one with ``refuse``."""
        self.seen += 1
        ids, counts = encoded
        excess = len(ids) - self.seq_length
        if excess > 0:
            if self.policy == "refuse":
                raise self._refused(len(ids), where)
            if self.policy == "drop":
                self.dropped += 1
                return None
            ids, counts = self.kept(encoded, self.seq_length)
            self.cut += 1
            self.lost += excess
        if not np.any(counts[1:]):  # the first token of a sample is predicted by nothing
            self.silent += 1
            return None
        return Encoded(ids, counts)

    def fit_pair(self, chosen: Encoded, rejected: Encoded, where: str) -> tuple[Encoded, ...]:
        """Both answers of a pair, as they share a sample; none: it is not used, as one of them has no token that counts
        within reach, or what is within reach is equal. Of a long pair the longer one is cut, or both to one half."""
        self.seen += 1
        pair, lengths = (chosen, rejected), (len(chosen.ids), len(rejected.ids))
        excess = sum(lengths) - self.seq_length
        if excess > 0:
            if self.policy == "refuse":
                raise self._refused(sum(lengths), where)
            if self.policy == "drop":
                self.dropped += 1
                return ()
            half = self.seq_length // 2
            room = [max(half, self.seq_length - other_length) for other_length in reversed(lengths)]
            pair = (self.kept(chosen, room[0]), self.kept(rejected, room[1]))
            self.cut += 1
            self.lost += sum(lengths) - sum(len(side.ids) for side in pair)
        if not all(np.any(side.counts[1:]) for side in pair) or np.array_equal(pair[0].ids, pair[1].ids):
            self.silent += 1
            return ()
        return pair

    def kept(self, encoded: Encoded, most: int) -> Encoded:
        """At most so many tokens, of the end that stays."""
        if len(encoded.ids) <= most:
            return encoded
        kept_tokens = slice(0, most) if self.policy == "keep-start" else slice(len(encoded.ids) - most, None)
        return Encoded(encoded.ids[kept_tokens], encoded.counts[kept_tokens])

    def _refused(self, tokens: int, where: str) -> UserError:
        return UserError(
            f"a {self.item} has {plural(tokens, 'token')}, a sample {self.seq_length}", field=FLAG,
            value="refuse", accepted="a longer --seq-length, keep-start, keep-end or drop", where=where,
        )  # fmt: skip

    @property
    def used(self) -> int:
        return self.seen - self.dropped - self.silent

    def report(self, name: str) -> str:
        """A line about a whole data set; empty where every conversation is used as it is."""
        sentences = []
        if self.cut:
            share = f"{self.cut:,} of {plural(self.seen, self.item)} longer than {self.seq_length} tokens"
            sentences.append(f"{share} {'are' if self.cut > 1 else 'is'} cut ({plural(self.lost, 'token')} lost)")
        if self.dropped:
            sentences.append(f"{plural(self.dropped, self.item)} longer than {self.seq_length} tokens left out")
        if self.silent:
            reason = "no token of the assistant is in reach"
            reason = "of an answer no token is in reach, or both are equal there" if self.item == "pair" else reason
            sentences.append(f"{plural(self.silent, self.item)} left out: {reason}")
        return f"data: {name}: {'; '.join(sentences)} ({FLAG} {self.policy})" if sentences else ""
