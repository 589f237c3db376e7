"""A path of --data-path -> its tokenised documents, whatever kind it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hetero_megatron.data.cache import Log, cache_key, say
from hetero_megatron.data.corpus import find_corpus, indexed_prefix, is_indexed
from hetero_megatron.data.indexed import TokenStore, open_indexed
from hetero_megatron.data.source import StoredSource
from hetero_megatron.data.tokenize import tokenize
from hetero_megatron.data.tokenizers import Tokenizer

_LOOKED_AT = 1000  # documents that decide whether a .bin holds ends of documents


def open_source(
    path: str,
    tokenizer: Tokenizer,
    cache_dir: Path | None,
    json_key: str = "text",
    log: Log = say,
    field: str = "--data-path",
) -> StoredSource:
    """Documents of a .bin/.idx prefix, ``stdlib``, or files of text, jsonl or parquet.

    Text is tokenised once into ``cache_dir`` (None: the user's cache folder). UserError for what cannot be read.
    """
    if is_indexed(path):
        store = open_indexed(indexed_prefix(path), field)
        return StoredSource(store, cache_key(store.identity, tokenizer.fingerprint), _ends_with(store, tokenizer.eod))
    store = tokenize(find_corpus(path, json_key, field), tokenizer, None if cache_dir is None else str(cache_dir), log)
    return StoredSource(store, store.identity, has_eod=False, drop=1)


def _ends_with(store: TokenStore, eod: int) -> bool:
    """Does every document that is looked at end with ``eod``?"""
    looked_at = np.unique(np.linspace(0, store.num_documents - 1, _LOOKED_AT).astype(np.int64))
    starts, ends = store.offsets[looked_at], store.offsets[looked_at + 1]
    ends = ends[ends > starts]
    return bool(len(ends)) and bool((store.tokens[ends - 1] == eod).all())
