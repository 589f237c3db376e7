"""Conversations that are all tokenized before the first step: packed and shuffled by global sample index."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hetero_megatron.data.cache import Log, cache_folder, cache_key
from hetero_megatron.data.chat.conversation import read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder, Encoded
from hetero_megatron.data.chat.overlong import Overlong
from hetero_megatron.data.chat.packing import best_fit, packed_sample
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
    records: RecordSource, encoder: ChatEncoder, cache: str | None, limit: int | None, log: Log
) -> TokenStore:
    """All conversations of a data set: ``2 * id + counts`` of every token, in one store; large ones are cached.

    Args:
        limit: rows of the model's embedding; UserError names the record of a token beyond them.
    """
    key = cache_key("conversations", records.identity, encoder.fingerprint)
    if records.num_bytes <= IN_MEMORY_BYTES:
        documents = [_joined(encoded) for encoded, _ in encoded_records(records, encoder, limit, log=log)]
        if not documents:
            raise empty(records)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return TokenStore(records.name, key, np.concatenate(documents), offsets)
    folder = cache_folder(cache)
    prefix = str(folder / f"conversations-{key}")
    with _one_writer(folder / f"conversations-{key}.lock"):  # whoever comes second finds what the first one wrote
        if not Path(f"{prefix}.idx").exists():
            log(f"data: tokenizing the conversations of {records.name} into {prefix}.bin ...")
            last, what = time.monotonic(), f"tokenizing conversations of {records.name}"
            with IndexedWriter(prefix, np.int32) as writer, WorkLine(what, 0, bytes=False) as line:
                for encoded, _ in encoded_records(records, encoder, limit, log=log):
                    writer.add(_joined(encoded))
                    line.add()
                    if time.monotonic() - last > _REPORT_SECONDS:
                        last = time.monotonic()
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
    told: set[str] = set()

    def work(record: tuple[Any, str], limits: CallLimits) -> list[Any]:
        value, where = record
        conversation = read_conversation(value, where)
        encoded = encoder.encode(conversation, where, limits)
        check_tokens(encoded.ids, limit, records.name, "--data-path", lambda _: f" in {where}")
        new = [key for key in encoder.unread(conversation) if key not in told]
        told.update(new)  # in the process, which knows what it said
        return [encoded.ids, encoded.counts, new]

    for record, (ids, counts, unread) in Guard(work, encoder.refuse).map(records.read(skip)):
        if log is not None and (new := [key for key in unread if key not in told]):
            told.update(new)
            log(f"data: {record.where}: not read: {', '.join(new)}")
        yield Encoded(ids, counts), record.where


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

    def __init__(
        self, store: TokenStore, documents: tuple[int, int], seq_length: int, seed: int, pad: int,
        overlong: Overlong, packing: bool = True,
    ) -> None:  # fmt: skip
        self.store, self.seq_length, self.seed, self.packing, self._pad = store, seq_length, seed, packing, pad
        self.overlong, self.documents = overlong, documents
        count = documents[1] - documents[0]
        found = tracked(range(*documents), f"indexing {store.name}", count, lambda _: 1, bytes=False)
        self._used = [i for i in found if overlong.fit(self._stored(i), f"{store.name}: {i}") is not None]
        if not self._used:
            raise UserError(
                f"none of its {plural(count, 'conversation')} can be used", field="--data-path",
                value=store.name, accepted="conversations with an answer within --seq-length tokens",
            )  # fmt: skip
        self._policy = Overlong(overlong.policy, seq_length)
        self._lengths = np.minimum(np.diff(store.offsets)[self._used], seq_length)
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
        number, at = divmod(index, self.num_packs)
        packs, order = self._epoch(number)
        fitted = [self._policy.fit(self._stored(self._used[i]), "") for i in packs[order[at]]]
        return packed_sample([f for f in fitted if f is not None], self.seq_length, self._pad)

    def _stored(self, i: int) -> Encoded:
        return _parted(self.store.tokens[int(self.store.offsets[i]) : int(self.store.offsets[i + 1])])

    def _epoch(self, number: int) -> tuple[list[list[int]], np.ndarray]:
        with self._lock:
            if number not in self._packs:
                for old in [n for n in self._packs if n not in (number - 1, number + 1, 0)]:
                    del self._packs[old]
                self._packs[number] = epoch_packs(self._lengths, self.seq_length, self.packing, self.seed, number)
            return self._packs[number]


def epoch_packs(
    lengths: np.ndarray, seq_length: int, packing: bool, seed: int, epoch: int
) -> tuple[list[list[int]], np.ndarray]:
    """(packs, the order in which they come)."""
    ties = permutation(len(lengths), seed, epoch, _TIES)
    packs = best_fit(lengths, seq_length, ties) if packing else [[i] for i in range(len(lengths))]
    return packs, permutation(len(packs), seed, epoch, _ORDER)
