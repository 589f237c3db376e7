"""Tokenises a text corpus into a token store; large ones are cached as .bin/.idx."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hetero_megatron.data.cache import Log, cache_folder, cache_key
from hetero_megatron.data.corpus import Corpus, Cursor
from hetero_megatron.data.guard import UNLIMITED, CallLimits, Guard
from hetero_megatron.data.indexed import IndexedWriter, TokenStore, open_indexed, token_dtype
from hetero_megatron.data.packing import check_tokens
from hetero_megatron.data.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    is_foreign,
    required_eod,
    too_costly,
    with_end,
)
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import WorkLine

IN_MEMORY_BYTES = 64 * 2**20  # bytes of this much text become tokens faster than they could be read from a cache
_REPORT_SECONDS = 60.0  # between two lines in a log


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, cache_path: str | None, log: Log, limit: int | None = None
) -> TokenStore:
    """The documents of a corpus, each followed by ``eod``; empty documents are skipped.

    Args:
        limit: rows of the model's embedding; UserError names the document of a token beyond them.
    """
    key = cache_key("tokens", corpus.identity(), tokenizer.fingerprint)
    dtype = token_dtype(tokenizer.vocab_size)
    if isinstance(tokenizer, ByteTokenizer) and corpus.num_bytes() <= IN_MEMORY_BYTES:
        documents = [d.astype(dtype) for d in _documents(corpus, tokenizer, log, limit)]
        if not documents:
            raise empty_corpus(corpus)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return TokenStore(corpus.name, key, np.concatenate(documents), offsets)
    folder = cache_folder(cache_path)
    prefix = str(folder / f"tokens-{key}")
    if not (folder / f"tokens-{key}.idx").exists():
        log(f"data: tokenizing {corpus.name} ({corpus.num_bytes():,} bytes, {tokenizer.name}) into {prefix}.bin ...")
        with IndexedWriter(prefix, dtype) as writer:
            count = 0
            for document in _documents(corpus, tokenizer, log, limit):
                writer.add(document)
                count += 1
            if not count:
                raise empty_corpus(corpus)
    store = open_indexed(prefix, "--data-cache-path")
    return TokenStore(corpus.name, key, store.tokens, store.offsets)


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Token ids of a few texts, within limits of time and memory (see :mod:`hetero_megatron.data.guard`)."""

    def refuse(text: str, _: str, why: str) -> UserError:
        return too_costly(tokenizer.name, why, f"text {text[:40]!r}")

    return [ids for _, ids in Guard(tokenizer.encode, refuse).map(texts)]


def encode_document(text: str, tokenizer: Tokenizer, limits: CallLimits = UNLIMITED) -> np.ndarray:
    """Token ids with one ``eod`` at the end."""
    ids = tokenizer.encode(text, limits)
    eod = required_eod(tokenizer, "a document of text has to end with one")
    return with_end(ids.astype(np.int32 if ids.dtype.itemsize < 4 else ids.dtype), eod)


def encode_checked(
    text: str, tokenizer: Tokenizer, corpus: Corpus, after: Cursor, limit: int | None, limits: CallLimits = UNLIMITED
) -> np.ndarray:
    """:func:`encode_document` for the document that ends at a cursor; a UserError names it."""
    try:
        document = encode_document(text, tokenizer, limits)
    except UserError as error:
        raise UserError(str(error), where=corpus.place(after)) from None
    check_tokens(document, limit, corpus.name, "--data-path", lambda _: f" in {corpus.place(after)}")
    return document


def encoded_documents(
    documents: Iterable[tuple[str, Cursor]], tokenizer: Tokenizer, corpus: Corpus, limit: int | None
) -> Iterator[tuple[np.ndarray | None, Cursor]]:
    """(tokens with ``eod`` at the end, cursor after it) of each document; None: it has no text.

    A tokenizer that others wrote works in a process with limits: see :mod:`hetero_megatron.data.guard`.
    """

    def work(document: tuple[str, Cursor], limits: CallLimits = UNLIMITED) -> np.ndarray | None:
        text, position = document
        return encode_checked(text, tokenizer, corpus, tuple(position), limit, limits) if text else None

    def refuse(document: tuple[str, Cursor], _: str, why: str) -> UserError:
        return too_costly(tokenizer.name, why, corpus.place(document[1]))

    if not is_foreign(tokenizer):
        return ((work(document), document[1]) for document in documents)
    return ((tokens, document[1]) for document, tokens in Guard(work, refuse).map(documents))


def _documents(corpus: Corpus, tokenizer: Tokenizer, log: Log, limit: int | None) -> Iterator[np.ndarray]:
    last, bytes_done = time.monotonic(), 0
    with WorkLine(f"tokenizing {corpus.name}", corpus.num_bytes()) as line:
        for document, cursor_after in encoded_documents(corpus.documents(), tokenizer, corpus, limit):
            if document is not None:
                yield document
            bytes_read = corpus.bytes_before(cursor_after)
            line.add(bytes_read - bytes_done)
            bytes_done = bytes_read
            if time.monotonic() - last > _REPORT_SECONDS:
                last = time.monotonic()
                log(f"data: {line}")


def empty_corpus(corpus: Corpus) -> UserError:
    """The error for a corpus without any text."""
    return UserError("the corpus is empty (no text)", field="--data-path", value=corpus.name, accepted="some text")
