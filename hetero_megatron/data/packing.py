"""Documents packed into samples of seq_length + 1 tokens, as in Megatron's GPT dataset.

Epoch e is all documents in an order drawn from (seed, e). The epochs form one endless stream of tokens; window k is
``stream[k*s : k*s + s + 1]``, so neighbours share one token and no token is dropped between epochs. The windows that
begin in an epoch are shuffled among themselves. A sample is a function of (data, seed, seq_length, index); the number
of requested samples does not matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hetero_megatron.data.cache import Log, cache_key, cached_arrays, say
from hetero_megatron.data.sample import Sample, document_starts
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import WorkLine, plural

if TYPE_CHECKING:
    from hetero_megatron.data.indexed import TokenStore

_KEPT_EPOCHS = 3  # a batch touches two; one more for a validation set that is read meanwhile
_SLOW_DOCUMENTS = 500_000  # from here on, building the index is announced
_CHECKED_TOKENS = 2**22
_DOCUMENTS, _WINDOWS = 0, 1


@dataclass(frozen=True)
class _Epoch:
    order: np.ndarray  # [documents] which document comes when
    starts: np.ndarray  # int64 [documents + 1] where it begins within the epoch
    windows: np.ndarray  # [windows that begin in this epoch] their order


def permutation(n: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """A fixed permutation of ``n``. RandomState instead of Generator: its stream is stable across NumPy versions."""
    state = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch, purpose])
    return state.permutation(n).astype(np.int32 if n < 2**31 else np.int64)


class PackedDataset:
    """Endless samples from the documents ``[first, last)`` of a store.

    Args:
        eod: token that ends a document, also inside a stored document; None: only stored documents count.
        vocab_size: upper bound on tokens; checked on the beginning of the data and on each sample.
        cache: folder for the index of each epoch; None: in memory only.
    """

    def __init__(
        self,
        store: TokenStore,
        documents: tuple[int, int],
        seq_length: int,
        seed: int,
        eod: int | None = None,
        vocab_size: int | None = None,
        cache: Path | None = None,
        log: Log = say,
        field: str = "--data-path",
    ) -> None:
        self.store, self.documents, self.seq_length, self.seed = store, documents, seq_length, seed
        self._eod, self._vocab_size, self._cache, self._log, self._field = eod, vocab_size, cache, log, field
        first, last = documents
        self._base = int(store.offsets[first])
        self.num_tokens = int(store.offsets[last]) - self._base
        if self.num_tokens < seq_length + 1:
            raise UserError(
                f"{plural(last - first, 'document')} with {plural(self.num_tokens, 'token')} are less than one sample "
                f"of {seq_length} + 1 tokens",
                field=field, value=store.name, accepted="more data, another --split, or a shorter --seq-length",
            )  # fmt: skip
        self._key = cache_key("epoch", store.identity, documents, seq_length, seed)
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()
        self._check(store.tokens[self._base : self._base + min(self.num_tokens, _CHECKED_TOKENS)])

    def all_tokens(self) -> np.ndarray:
        """The tokens of one epoch in stored order; possibly a memory map."""
        return self.store.tokens[self._base : self._base + self.num_tokens]

    def num_epochs(self, num_samples: int) -> int:
        """Number of epochs that the first samples touch."""
        return -(-(num_samples * self.seq_length + 1) // self.num_tokens) if num_samples else 0

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}")
        number = index * self.seq_length // self.num_tokens
        first = -(-number * self.num_tokens // self.seq_length)  # first window that begins in this epoch
        window = first + int(self._epoch(number).windows[index - first])
        offset = window * self.seq_length - number * self.num_tokens
        pieces, starts, length = [], [], 0
        while length < self.seq_length + 1:
            for piece, is_start in self._read(number, offset, self.seq_length + 1 - length):
                if is_start:
                    starts.append(length)
                pieces.append(piece)
                length += len(piece)
            number, offset = number + 1, 0
        tokens = np.concatenate(pieces).astype(np.int64)
        self._check(tokens)
        return Sample(tokens, document_starts(tokens, np.array(starts, np.int64), self._eod))

    def _read(self, number: int, offset: int, count: int) -> list[tuple[np.ndarray, bool]]:
        """(tokens, whether they begin a document) from ``offset`` in an epoch: ``count`` tokens, or up to its end."""
        epoch = self._epoch(number)
        place = int(np.searchsorted(epoch.starts, offset, side="right")) - 1
        pieces = []
        while count > 0 and place < len(epoch.order):
            document = self.documents[0] + int(epoch.order[place])
            start, stop = int(self.store.offsets[document]), int(self.store.offsets[document + 1])
            skip = offset - int(epoch.starts[place])
            piece = self.store.tokens[start + skip : min(stop, start + skip + count)]
            if len(piece):
                pieces.append((piece, skip == 0))
            count -= len(piece)
            offset += len(piece)
            place += 1
        return pieces

    def _epoch(self, number: int) -> _Epoch:
        with self._lock:
            if number not in self._epochs:
                while len(self._epochs) >= _KEPT_EPOCHS:
                    del self._epochs[min(self._epochs, key=lambda epoch: (epoch > number, epoch))]
                build = cached_arrays(self._cache, f"{self._key}-{number}", lambda: self._build(number), self._log)
                self._epochs[number] = _Epoch(**build)
            return self._epochs[number]

    def _build(self, number: int) -> dict[str, np.ndarray]:
        first, last = self.documents
        loud = last - first >= _SLOW_DOCUMENTS
        began = time.monotonic()
        if loud:
            size = plural(last - first, "document")
            self._log(f"data: building the index of {self.store.name}, epoch {number}: {size} ...")
        begin, end = (-(-n * self.num_tokens // self.seq_length) for n in (number, number + 1))
        work = 2 * (last - first) + end - begin  # elements: two arrays over documents, one over windows
        with WorkLine(f"indexing epoch {number} of {self.store.name}", work, bytes=False) as line:
            order = permutation(last - first, self.seed, number, _DOCUMENTS)
            line.add(len(order))
            starts = np.zeros(len(order) + 1, np.int64)
            np.cumsum(np.diff(self.store.offsets[first : last + 1])[order], out=starts[1:])
            line.add(len(order))
            windows = permutation(end - begin, self.seed, number, _WINDOWS)
        if loud:
            self._log(f"data: index of {self.store.name}, epoch {number}, built in {time.monotonic() - began:.1f} s")
        return {"order": order, "starts": starts, "windows": windows}

    def _check(self, tokens: np.ndarray) -> None:
        check_tokens(tokens, self._vocab_size, self.store.name, self._field, self._place)

    def _place(self, token: int) -> str:
        """The first stored document with a token, for messages."""
        stored = self.all_tokens()
        for start in range(0, len(stored), _CHECKED_TOKENS):
            hits = np.flatnonzero(stored[start : start + _CHECKED_TOKENS] == token)
            if hits.size:
                index = self._base + start + int(hits[0])
                return (
                    f" in document {int(np.searchsorted(self.store.offsets, index, side='right')) - 1} (counted from 0)"
                )
        return ""


def check_tokens(
    tokens: np.ndarray, vocab_size: int | None, name: str, field: str, place: Callable[[int], str]
) -> None:
    """UserError unless all tokens are in ``[0, vocab_size)``; ``place`` says where a token is, for the message."""
    if vocab_size is None or not tokens.size:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        bad_id = low if low < 0 else high
        raise UserError(
            f"{name} holds token id {bad_id}{place(bad_id)}, but the vocabulary has {plural(vocab_size, 'entry')}",
            field=field, value=name,
            accepted=f"ids 0..{vocab_size - 1}: data made with the tokenizer that is given, or a model with more rows",
        )  # fmt: skip
