"""The seam between reading data and packing it: tokenised documents by number."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class TokenSource(Protocol):
    """Tokenised documents that can be read in any order.

    Attributes:
        num_documents: how many there are, at least 1.
        lengths: int64 [num_documents], tokens per document without the end-of-document token.
        num_tokens: their sum.
        fingerprint: hash of everything that determines the content; part of cache keys.
    """

    @property
    def num_documents(self) -> int: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def document(self, i: int) -> np.ndarray:
        """int64 [lengths[i]]: the tokens of document ``i`` without the end-of-document token."""
        ...

    def read(self, i: int, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: tokens ``[start, stop)`` of document ``i``, within ``0 <= start <= stop <= lengths[i]``."""
        ...
