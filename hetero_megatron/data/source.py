"""The seam between reading data and packing it: tokenised documents by number."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hetero_megatron.data.indexed import TokenStore


class TokenSource(Protocol):
    """Tokenised documents that can be read in any order.

    Attributes:
        num_documents: how many there are.
        lengths: int64 [num_documents], tokens per document as ``document`` returns it.
        num_tokens: their sum.
        fingerprint: hash of everything that determines the content; part of cache keys.
        has_eod: documents come with their end-of-document token (a .bin made with --append-eod); otherwise without.
    """

    @property
    def num_documents(self) -> int: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def has_eod(self) -> bool: ...

    def document(self, i: int) -> np.ndarray:
        """int64 [lengths[i]]: the tokens of document ``i``."""
        ...

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: tokens ``[start, stop)`` of document ``i``; ``0 <= start <= stop <= lengths[i]``."""
        ...


class StoredSource:
    """Documents of a token store. ``drop`` tokens at the end of each (its end of document) are left out."""

    def __init__(self, store: TokenStore, fingerprint: str, has_eod: bool, drop: int = 0) -> None:
        self.store, self.fingerprint, self.has_eod = store, fingerprint, has_eod
        self.lengths: np.ndarray = np.diff(store.offsets) - drop
        self.num_documents, self.num_tokens = store.num_documents, int(self.lengths.sum())

    def document(self, i: int) -> np.ndarray:
        return self.read(i, 0, int(self.lengths[i]))

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        if not (0 <= i < self.num_documents and 0 <= start <= stop <= self.lengths[i]):
            raise IndexError(f"tokens [{start}, {stop}) of document {i} of {self.num_documents}")
        base = int(self.store.offsets[i])
        return np.asarray(self.store.tokens[base + start : base + stop], dtype=np.int64)
