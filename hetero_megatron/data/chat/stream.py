"""Conversations that are read as they come, block by block: each block is shuffled and packed by itself.

A block of ``block`` records is the shuffle buffer. Sample i depends on the data, the seed and ``block`` only, and
reading can start again at any block, so a checkpoint holds (sample, epoch, records before the block).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_megatron.data.cache import Log
from hetero_megatron.data.chat.encode import ChatEncoder, Encoded
from hetero_megatron.data.chat.overlong import Overlong
from hetero_megatron.data.chat.packed import empty, encoded_records, epoch_packs
from hetero_megatron.data.chat.packing import packed_sample
from hetero_megatron.data.chat.records import RecordSource
from hetero_megatron.data.sample import Sample
from hetero_megatron.errors import UserError

WINDOW = 4096  # samples before the newest one that are kept, at least
_PLACES = 512  # blocks whose beginnings are kept


@dataclass(frozen=True)
class _Place:
    """Where a block begins: its first sample, its epoch, its number, and records of that epoch before it."""

    sample: int = 0
    epoch: int = 0
    block: int = 0
    records: int = 0


class StreamedConversations:
    """Samples in the order of the data, shuffled within blocks. Thread-safe.

    Args:
        block: records that are shuffled together.
        limit: rows of the model's embedding.
        window: samples before the newest one that are kept.
    """

    def __init__(
        self, records: RecordSource, encoder: ChatEncoder, seq_length: int, seed: int, pad: int, overlong: Overlong,
        packing: bool = True, block: int = 1000, limit: int | None = None,
        window: int = WINDOW, log: Log | None = None,
    ) -> None:  # fmt: skip
        self.records, self.seq_length, self.overlong = records, seq_length, overlong
        self.encoder, self._seed, self._pad, self._packing = encoder, seed, pad, packing
        self._block, self._limit, self._window, self._lock = block, limit, window, threading.Lock()
        self._log: Log | None = log
        self._recent: dict[int, Sample] = {}
        self._places: list[_Place] = []
        self._broken: UserError | None = None
        self._restart(_Place())

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}")
        with self._lock:
            if index not in self._recent:
                if index < self._next.sample:
                    earlier = [p for p in self._places if p.sample <= index]
                    self._restart(earlier[-1] if earlier else _Place())
                while self._next.sample <= index:
                    self._read_block()
            return self._recent[index]

    def state_dict(self, sample: int) -> dict[str, Any]:
        """JSON from which ``sample`` and later ones can be read: the block that it is in, or an earlier one."""
        with self._lock:
            earlier = [p for p in self._places if p.sample <= sample]
            place = earlier[-1] if earlier else _Place()
        return {
            "sample": place.sample, "epoch": place.epoch, "block": place.block, "records": place.records,
            "size": self._block, "name": self.records.name,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """UserError for a state of other blocks, whose samples would be others."""
        if state.get("size") != self._block:
            raise UserError(
                "the checkpoint was made with another one, and samples after it would be others",
                field="--shuffle-buffer", value=self._block, accepted=str(state.get("size")),
            )  # fmt: skip
        with self._lock:
            self._restart(_Place(*(int(state[key]) for key in ("sample", "epoch", "block", "records"))))

    def _restart(self, place: _Place) -> None:
        self._recent.clear()
        self._broken = None
        self._places = [p for p in self._places if p.sample < place.sample]
        self._next = place
        self._reader = self._read(place)

    def _read(self, place: _Place) -> Iterator[tuple[Encoded, str]]:
        log, self._log = self._log, None  # of the first time that the data are read
        return encoded_records(self.records, self.encoder, self._limit, place.records, log)

    def _read_block(self) -> None:
        """The samples of the next block; at the end of the data the next epoch begins."""
        if self._broken is not None:
            raise self._broken
        place = self._next
        try:
            records = list(itertools.islice(self._reader, self._block))
            fitted = [
                f for encoded, record_name in records if (f := self.overlong.fit(encoded, record_name)) is not None
            ]
            if not records and not place.records:
                raise empty(self.records)
            if len(records) < self._block and not fitted and not place.records:
                raise UserError(
                    "none of its conversations can be used", field="--data-path", value=self.records.name,
                    accepted="conversations with an answer within --seq-length tokens",
                )  # fmt: skip
        except UserError as error:  # the reader ends there, and others may ask for samples beyond it
            self._broken = error
            raise
        self._places.append(place)
        del self._places[:-_PLACES]
        count = 0
        if fitted:
            lengths = np.array([len(f.ids) for f in fitted], np.int64)
            seed = self._seed + (place.block << 34)
            packs, order = epoch_packs(lengths, self.seq_length, self._packing, seed, place.epoch)
            for count, pack_index in enumerate(order.tolist(), 1):
                parts = [fitted[i] for i in packs[pack_index]]
                self._recent[place.sample + count - 1] = packed_sample(parts, self.seq_length, self._pad)
        for old in [i for i in self._recent if i < place.sample + count - self._window]:
            del self._recent[old]
        if len(records) < self._block:
            self._next = _Place(place.sample + count, place.epoch + 1)
            self._reader = self._read(self._next)
        else:
            self._next = _Place(place.sample + count, place.epoch, place.block + 1, place.records + len(records))
