"""Conversations that are all tokenized before the first step: packed and shuffled by global sample index."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hetero_megatron.data.cache import Log, cache_folder, cache_key
from hetero_megatron.data.chat.conversation import Conversation, read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder, Encoded
from hetero_megatron.data.chat.overlong import Overlong
from hetero_megatron.data.chat.packing import best_fit, packed_sample
from hetero_megatron.data.chat.pairs import read_labelled, read_pair
from hetero_megatron.data.chat.records import RecordSource
from hetero_megatron.data.guard import CallLimits, Guard
from hetero_megatron.data.indexed import IndexedWriter, TokenStore, cannot_write, open_indexed
from hetero_megatron.data.packing import check_tokens, permutation
from hetero_megatron.data.sample import Sample
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import WorkLine, plural, tracked

IN_MEMORY_BYTES = 1 << 20  # of records that become tokens in less than a second
_REPORT_SECONDS = 60.0  # between two lines in a log
_TIES, _ORDER = 2, 3  # purposes of permutations, beside those of pretraining data


def encode_store(
    records: RecordSource, encoder: ChatEncoder, cache: str | None, limit: int | None, log: Log,
    item: str = "conversation",
) -> TokenStore:  # fmt: skip
    """All conversations of a data set: ``2 * id + counts`` of every token, in one store; large ones are cached.

    Args:
        limit: rows of the model's embedding; UserError names the record of a token beyond them.
        item: what a record is: of a ``pair`` two conversations are stored, the chosen and the rejected one; of an
            ``example`` its label is the mark of the first token, which nothing predicts.
    """
    items = f"{item}s"
    key = cache_key(items, records.identity, encoder.fingerprint)
    encoded = _encoded(records, encoder, limit, log=log, parts=_PARTS[item])
    if records.num_bytes <= IN_MEMORY_BYTES:
        documents = [_joined(encoded_part) for encoded_parts, _ in encoded for encoded_part in encoded_parts]
        if not documents:
            raise empty(records)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return TokenStore(records.name, key, np.concatenate(documents), offsets)
    folder = cache_folder(cache)
    prefix = str(folder / f"{items}-{key}")
    with _one_writer(folder / f"{items}-{key}.lock"):  # whoever comes second finds what the first one wrote
        if not Path(f"{prefix}.idx").exists():
            log(f"data: tokenizing the {items} of {records.name} into {prefix}.bin ...")
            last_report, work = time.monotonic(), f"tokenizing {items} of {records.name}"
            with IndexedWriter(prefix, np.int32) as writer, WorkLine(work, 0, bytes=False) as line:
                for encoded_parts, _ in encoded:
                    for encoded_part in encoded_parts:
                        writer.add(_joined(encoded_part))
                    line.add()
                    if time.monotonic() - last_report > _REPORT_SECONDS:
                        last_report = time.monotonic()
                        log(f"data: {line}")
                if not line.done:
                    raise empty(records)
    store = open_indexed(prefix, "--data-cache-path")
    return TokenStore(records.name, key, store.tokens, store.offsets)


def encoded_records(
    records: RecordSource, encoder: ChatEncoder, limit: int | None, skip: int = 0, log: Log | None = None
) -> Iterator[tuple[Encoded, str]]:
    """(tokens and mask, where it was read) of every record, made in a process with limits: see :mod:`..guard`.

    Args:
        limit: rows of the model's embedding.
        log: is told once of each key that nothing reads.
    """
    for (encoded,), place in _encoded(records, encoder, limit, skip, log):
        yield encoded, place


def _alone(record: Mapping[str, Any], where: str) -> tuple[Conversation, ...]:
    return (read_conversation(record, where),)


_PARTS = {"conversation": _alone, "pair": read_pair, "example": read_labelled}


def _encoded(
    records: RecordSource, encoder: ChatEncoder, limit: int | None, skip: int = 0, log: Log | None = None,
    parts: Callable[[Mapping[str, Any], str], tuple[Conversation, ...]] = _alone,
) -> Iterator[tuple[list[Encoded], str]]:  # fmt: skip
    """The same of the conversations that ``parts`` makes of each record."""
    told_keys: set[str] = set()

    def work(record: tuple[Any, str], limits: CallLimits) -> list[Any]:
        value, place = record
        token_arrays: list[Any] = []
        unread: list[str] = []
        for conversation in parts(value, place):
            encoded = encoder.encode(conversation, place, limits)
            if conversation.desired is not None and len(encoded.counts):
                encoded.counts[0] = conversation.desired
            check_tokens(encoded.ids, limit, records.name, "--data-path", lambda _: f" in {place}")
            unread += [key for key in encoder.unread(conversation) if key not in told_keys]
            told_keys.update(unread)  # in the process, which knows what it said
            token_arrays += [encoded.ids, encoded.counts]
        return [*token_arrays, unread]

    for record, (*token_arrays, unread) in Guard(work, encoder.refuse).map(records.read(skip)):
        if log is not None and (new_keys := [key for key in unread if key not in told_keys]):
            told_keys.update(new_keys)
            log(f"data: {record.where}: not read: {', '.join(new_keys)}")
        yield [Encoded(*pair) for pair in zip(token_arrays[::2], token_arrays[1::2], strict=True)], record.where


def _joined(encoded: Encoded) -> np.ndarray:
    return (2 * encoded.ids + encoded.counts).astype(np.int32)


def _parted(stored: np.ndarray) -> Encoded:
    return Encoded(stored.astype(np.int64) >> 1, (stored & 1).astype(bool))


def empty(records: RecordSource) -> UserError:
    return UserError("the data set has no record", field="--data-path", value=records.name, accepted="conversations")


@contextmanager
def _one_writer(path: Path) -> Iterator[None]:
    """Others wait here, also in other processes; a lock is gone with the process that holds it."""
    try:
        file = path.open("w")
    except OSError as error:
        raise cannot_write(error, "--data-cache-path", path) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class PackedConversations:
    """Endless samples from the conversations ``[first, last)`` of a store.

    Every epoch has each conversation once, in packs that are drawn from (seed, epoch), so a sample is a function of
    (data, seed, seq_length, index).

    Args:
        overlong: what becomes of conversations longer than ``seq_length``; counts them.
        packing: several conversations share a sample; else each one has its own.
        pad: id for what is left of a sample.
    """

    item = "conversation"

    def __init__(
        self, store: TokenStore, documents: tuple[int, int], seq_length: int, seed: int, pad: int,
        overlong: Overlong, packing: bool = True,
    ) -> None:  # fmt: skip
        self.store, self.seq_length, self.seed, self.packing, self._pad = store, seq_length, seed, packing, pad
        self.overlong, self.documents = overlong, documents
        begin, end = self._items(documents)
        items = tracked(range(begin, end), f"indexing {store.name}", end - begin, lambda _: 1, bytes=False)
        lengths = {i: self._length(self._parts(i, overlong, f"{store.name}: {i}")) for i in items}
        self._used = [i for i, length in lengths.items() if length]
        if not self._used:
            raise UserError(
                f"none of its {plural(end - begin, self.item)} can be used", field="--data-path",
                value=store.name, accepted=f"{self.item}s with an answer within --seq-length tokens",
            )  # fmt: skip
        self._policy = Overlong(overlong.policy, seq_length, self.item)
        self._lengths = np.array([lengths[i] for i in self._used], np.int64)
        self._packs: dict[int, tuple[list[list[int]], np.ndarray]] = {}
        self._lock = threading.Lock()
        self.num_packs = len(self._epoch(0)[0])

    @property
    def num_conversations(self) -> int:
        return len(self._used)

    @property
    def fill(self) -> float:
        """Share of a sample's tokens that are no padding."""
        return float(self._lengths.sum()) / (self.num_packs * self.seq_length)

    def num_epochs(self, num_samples: int) -> int:
        return -(-num_samples // self.num_packs)

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}")
        epoch, pack_index = divmod(index, self.num_packs)
        packs, order = self._epoch(epoch)
        return self._sample([self._used[i] for i in packs[order[pack_index]]])

    def _sample(self, items: Sequence[int]) -> Sample:
        fitted = [part for i in items for part in self._parts(i, self._policy, "")]
        return packed_sample(fitted, self.seq_length, self._pad)

    def _items(self, documents: tuple[int, int]) -> tuple[int, int]:
        """The first and the last item, half-open."""
        return documents

    def _parts(self, item: int, overlong: Overlong, where: str) -> Sequence[Encoded]:
        """The documents of an item as they are used; none: it is not."""
        fitted = overlong.fit(self._stored(item), where)
        return () if fitted is None else (fitted,)

    def _length(self, parts: Sequence[Encoded]) -> int:
        """Of a sample's tokens that an item takes, 0 if it is not used."""
        return sum(len(part.ids) for part in parts)

    def _stored(self, i: int) -> Encoded:
        return _parted(self.store.tokens[int(self.store.offsets[i]) : int(self.store.offsets[i + 1])])

    def _epoch(self, number: int) -> tuple[list[list[int]], np.ndarray]:
        with self._lock:
            if number not in self._packs:
                for old in [n for n in self._packs if n not in (number - 1, number + 1, 0)]:
                    del self._packs[old]
                self._packs[number] = epoch_packs(self._lengths, self.seq_length, self.packing, self.seed, number)
            return self._packs[number]


class PackedPairs(PackedConversations):
    """The same of preference pairs: both answers are in one sample, each a document with the prompt before it.

    Args:
        documents: of the store, of which each pair has two.
        first: added to a pair's number, so that those of several stores differ.
    """

    item = "pair"

    def __init__(
        self, store: TokenStore, documents: tuple[int, int], seq_length: int, seed: int, pad: int,
        overlong: Overlong, packing: bool = True, first: int = 0,
    ) -> None:  # fmt: skip
        self._first = first
        super().__init__(store, documents, seq_length, seed, pad, overlong, packing)

    def _items(self, documents: tuple[int, int]) -> tuple[int, int]:
        return documents[0] // 2, documents[1] // 2

    def _parts(self, item: int, overlong: Overlong, where: str) -> Sequence[Encoded]:
        return overlong.fit_pair(self._stored(2 * item), self._stored(2 * item + 1), where)

    def _sample(self, items: Sequence[int]) -> Sample:
        return super()._sample(items)._replace(pairs=tuple(self._first + i for i in items))


class PackedExamples(PackedConversations):
    """The same of answers with a label. Beside each sample is one with the same prompts, each with the answer of the
    example before it in the data, for KTO's estimate of the divergence.

    Args:
        first: added to an example's number, so that those of several stores differ.
    """

    item = "example"

    def __init__(
        self, store: TokenStore, documents: tuple[int, int], seq_length: int, seed: int, pad: int,
        overlong: Overlong, packing: bool = True, first: int = 0,
    ) -> None:  # fmt: skip
        self._first = first
        if documents[1] - documents[0] < 2:
            problem = "an estimate of the divergence needs another example's answer, and there is one example"
            raise UserError(problem, field="--data-path", value=store.name, accepted="two or more examples in a split")
        super().__init__(store, documents, seq_length, seed, pad, overlong, packing)

    def _parts(self, item: int, overlong: Overlong, where: str) -> Sequence[Encoded]:
        """The example, and its prompt with another answer."""
        example, neighbour = (
            self._example(item),
            self._example(item - 1 if item > self.documents[0] else self.documents[1] - 1),
        )
        fitted = overlong.fit(example, where)
        if fitted is None:
            return ()
        prompt_end, other_answer = int(np.argmax(example.counts)), int(np.argmax(neighbour.counts))
        mixed = Encoded(
            *(np.concatenate([a[:prompt_end], b[other_answer:]]) for a, b in zip(example, neighbour, strict=True))
        )
        return fitted, overlong.kept(mixed, self.seq_length)

    def _length(self, parts: Sequence[Encoded]) -> int:
        return max((len(part.ids) for part in parts), default=0)

    def _example(self, item: int) -> Encoded:
        """Without its label."""
        stored = self._stored(item)
        stored.counts[:1] = False
        return stored

    def _sample(self, items: Sequence[int]) -> Sample:
        sides = zip(*(self._parts(i, self._policy, "") for i in items), strict=True)
        numbers, labels = tuple(self._first + i for i in items), tuple(bool(self._stored(i).counts[0]) for i in items)
        matched, mixed = (
            packed_sample(fitted, self.seq_length, self._pad)._replace(pairs=numbers, desired=labels)
            for fitted in sides
        )
        return matched._replace(mismatched=mixed)


def epoch_packs(
    lengths: np.ndarray, seq_length: int, packing: bool, seed: int, epoch: int
) -> tuple[list[list[int]], np.ndarray]:
    """(packs, the order in which they come)."""
    ties = permutation(len(lengths), seed, epoch, _TIES)
    packs = best_fit(lengths, seq_length, ties) if packing else [[i] for i in range(len(lengths))]
    return packs, permutation(len(packs), seed, epoch, _ORDER)
