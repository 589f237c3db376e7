"""--dataloader-type streaming: a corpus read sequentially without an index; its cursor is saved in checkpoints.

Documents keep their order; sample i is tokens ``[i*s, i*s + s + 1)`` of the endless repetition of the corpus. Samples
should be requested nearly in order: a window of them is kept; going back further reads again from the beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hetero_megatron.data.corpus import START, Corpus, Cursor
from hetero_megatron.data.sample import Sample, document_starts
from hetero_megatron.data.tokenize import empty_corpus, encoded_documents
from hetero_megatron.data.tokenizers import Tokenizer
from hetero_megatron.errors import UserError

WINDOW = 4096


class _SampleReader:
    """Consecutive samples, each with the cursor needed to restart at it."""

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, seq_length: int, sample: int, cursor: Cursor, skip: int,
        limit: int | None,
    ) -> None:  # fmt: skip
        self._corpus, self._tokenizer, self._length, self._limit = corpus, tokenizer, seq_length, limit
        self.sample = sample  # the next one to be produced
        self._documents = self._read(cursor)
        self._pending: list[tuple[Cursor, np.ndarray, int]] = []  # (cursor before it, tokens, tokens already used)
        self._have = 0  # unused tokens in _pending
        if skip or cursor:
            start_cursor, tokens = next(self._documents)
            if skip > len(tokens):
                raise _other_corpus(corpus)
            self._push(start_cursor, tokens, skip)

    def next(self) -> tuple[Sample, Cursor, int]:
        """(sample, cursor, skip): ``cursor`` and ``skip`` make a reader that begins with this sample."""
        while self._have < self._length + 1:
            self._push(*next(self._documents), 0)
        cursor, _, skip = self._pending[0]
        # Only what is needed: a document may be a whole file, and is sliced here once per sample.
        tokens = np.concatenate([piece[used : used + self._length + 1] for _, piece, used in self._pending])
        lengths = [len(piece) - tokens_used for _, piece, tokens_used in self._pending]
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        starts = starts[1:] if skip else starts
        tokens = tokens[: self._length + 1]
        self._drop(self._length)
        self.sample += 1
        return Sample(tokens.astype(np.int64), document_starts(tokens, starts, self._tokenizer.eod)), cursor, skip

    def _push(self, before: Cursor, tokens: np.ndarray, used: int) -> None:
        self._pending.append((before, tokens, used))
        self._have += len(tokens) - used

    def _drop(self, count: int) -> None:
        self._have -= count
        while count:
            cursor_before, tokens, tokens_used = self._pending[0]
            step = min(count, len(tokens) - tokens_used)
            self._pending[0] = (cursor_before, tokens, tokens_used + step)
            count -= step
            if tokens_used + step == len(tokens):
                self._pending.pop(0)

    def _read(self, cursor: Cursor) -> Iterator[tuple[Cursor, np.ndarray]]:
        """(cursor before it, tokens with eod) of each document, for ever."""
        cursor_before = cursor
        for tokens, cursor_after in encoded_documents(self._repeat(cursor), self._tokenizer, self._corpus, self._limit):
            if tokens is not None:
                yield cursor_before, tokens
            cursor_before = cursor_after

    def _repeat(self, cursor: Cursor) -> Iterator[tuple[str, Cursor]]:
        """The documents from a cursor on, and the whole corpus again and again."""
        while True:
            empty = cursor == START
            for text, cursor_after in self._corpus.documents(cursor):
                empty = empty and not text
                yield text, cursor_after
            if empty:
                raise empty_corpus(self._corpus)
            cursor = START
            yield "", START


class StreamingDataset:
    """Samples of a corpus in its own order. Thread-safe.

    Args:
        vocab_size: upper bound on tokens; None: not checked.
        window: number of samples before the newest one that are kept.
    """

    kind = "streams"

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, seq_length: int, vocab_size: int | None = None, window: int = WINDOW
    ) -> None:
        self.corpus, self.tokenizer, self.seq_length = corpus, tokenizer, seq_length
        self._vocab_size, self._window, self._lock = vocab_size, window, threading.Lock()
        self._recent: dict[int, tuple[Sample, Cursor, int]] = {}
        self._reader = _SampleReader(corpus, tokenizer, seq_length, 0, START, 0, vocab_size)
        self._broken: UserError | None = None

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}")
        with self._lock:
            if index not in self._recent:
                if index < self._reader.sample:
                    self._restart(0, START, 0)
                while self._reader.sample <= index:
                    self._step()
            return self._recent[index][0]

    def state_dict(self, sample: int) -> dict[str, Any]:
        """A small JSON state from which ``sample`` and later samples can be read.

        If this rank has not read that far, the state is of an earlier sample, which is correct but slower.
        """
        with self._lock:
            earlier = [i for i in self._recent if i <= sample]
            start, (_, cursor, skip) = (max(earlier), self._recent[max(earlier)]) if earlier else (0, (None, START, 0))
            return {"sample": start, "cursor": list(cursor), "skip": skip, "corpus": self._size()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restart from a ``state_dict``; UserError if the number or sizes of the files differ."""
        if state["corpus"] != self._size():
            raise _other_corpus(self.corpus)
        with self._lock:
            self._restart(int(state["sample"]), tuple(int(n) for n in state["cursor"]), int(state["skip"]))

    def _restart(self, sample: int, cursor: Cursor, skip: int) -> None:
        self._recent.clear()
        self._broken = None
        self._reader = _SampleReader(
            self.corpus, self.tokenizer, self.seq_length, sample, cursor, skip, self._vocab_size
        )

    def _size(self) -> list[int]:
        """File sizes, on which cursors rely. Paths and times may differ between machines."""
        return [len(self.corpus.files), self.corpus.num_bytes()]

    def _step(self) -> None:
        if self._broken is not None:
            raise self._broken
        number = self._reader.sample
        try:
            block = self._reader.next()
        except UserError as error:  # the reader ends there, and others may ask for samples beyond it
            self._broken = error
            raise
        self._recent[number] = block
        self._recent.pop(number - self._window, None)


def _other_corpus(corpus: Corpus) -> UserError:
    return UserError(
        "the corpus is not the one that the state was saved with",
        field="--data-path",
        value=corpus.name,
        accepted="the same files and tokenizer as in the run that saved the checkpoint",
    )
