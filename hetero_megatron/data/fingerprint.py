"""A short fingerprint of the data that a run reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from hetero_megatron.data.blend import BlendedDataset
from hetero_megatron.data.chat.packed import PackedConversations
from hetero_megatron.data.chat.records import FileRecords, RecordSource
from hetero_megatron.data.chat.stream import StreamedConversations
from hetero_megatron.data.corpus import Corpus
from hetero_megatron.data.indexed import TokenStore
from hetero_megatron.data.packing import PackedDataset
from hetero_megatron.data.sample import Dataset
from hetero_megatron.data.streaming import StreamingDataset
from hetero_megatron.errors import UserError

SAMPLES = 4  # the first ones: windows from all over the data, because they are shuffled
PLACES, WIDTH = 1024, 64  # of stored tokens: windows of so many, spread evenly; less are hashed as a whole
FILES, RECORDS = 256, 16  # of a stream that are looked into; all sizes count


def corpus_fingerprint(dataset: Dataset | None, tokenizer: str) -> str:
    """16 hex digits of what is stored: how many documents, their sizes and tokens at about a thousand places each, all
    over it. Empty for data that are not stored (streams, mock data).

    Args:
        tokenizer: the tokenizer's fingerprint.
    """
    digest = hashlib.sha256(tokenizer.encode())
    parts = list(_stored(dataset))
    for store, (first, last) in parts:
        digest.update(repr((first, last, store.num_documents, store.num_tokens)).encode())
        for array in (store.offsets, store.tokens):
            digest.update(_spread(array).astype("<i8").tobytes())
    return digest.hexdigest()[:16] if parts else ""


def _stored(dataset: Dataset | None) -> Iterator[tuple[TokenStore, tuple[int, int]]]:
    """(store, first and last document) of each part of a blend."""
    if isinstance(dataset, BlendedDataset):
        for part in dataset.datasets:
            yield from _stored(part)
    elif isinstance(dataset, (PackedDataset, PackedConversations)):
        yield dataset.store, dataset.documents


def _spread(array: np.ndarray) -> np.ndarray:
    """All of a short array, windows of a long one, its beginning and its end among them."""
    if len(array) <= PLACES * WIDTH:
        return np.asarray(array)
    starts = np.linspace(0, len(array) - WIDTH, PLACES).astype(np.int64)
    return np.concatenate([array[start : start + WIDTH] for start in starts])


def stream_fingerprint(dataset: Dataset | None) -> str:
    """16 hex digits of what a stream reads: the sizes of its files and bytes at about a thousand places all over them;
    of a data set of the hub its first records, which are read for that. Empty for other data."""
    digest, found = hashlib.sha256(), False
    for source, how in _streamed(dataset):
        found = True
        digest.update(how.encode())
        if isinstance(source, Corpus):
            digest.update(_of_files(source))
        else:
            for record in islice(source.read(), RECORDS):
                digest.update(json.dumps(record.value, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16] if found else ""


def _streamed(dataset: Dataset | None) -> Iterator[tuple[Corpus | RecordSource, str]]:
    """(what is read, how its text becomes tokens) of each part of a blend."""
    if isinstance(dataset, BlendedDataset):
        for part in dataset.datasets:
            yield from _streamed(part)
    elif isinstance(dataset, StreamingDataset):
        yield dataset.corpus, dataset.tokenizer.fingerprint
    elif isinstance(dataset, StreamedConversations):
        records = dataset.records
        yield records.corpus if isinstance(records, FileRecords) else records, dataset.encoder.fingerprint


def _of_files(corpus: Corpus) -> bytes:
    digest = hashlib.sha256()
    try:
        digest.update(repr([path.stat().st_size for path in corpus.files]).encode())
        for path in _some(corpus.files):
            digest.update(_spread_bytes(path, max(1, PLACES // len(corpus.files))))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise UserError(problem, field="--data-path", value=str(error.filename or corpus.name)) from None
    return digest.digest()


def _some(files: Sequence[Path]) -> Sequence[Path]:
    """At most ``FILES``, spread evenly, the first and the last among them."""
    return [files[i] for i in sorted({round(x) for x in np.linspace(0, len(files) - 1, min(FILES, len(files)))})]


def _spread_bytes(path: Path, places: int) -> bytes:
    """All of a short file, windows of a long one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= places * WIDTH:
            return file.read()
        out = []
        for start in np.linspace(0, size - WIDTH, places).astype(np.int64).tolist():
            file.seek(start)
            out.append(file.read(WIDTH))
        return b"".join(out)


def data_fingerprint(dataset: Dataset | None) -> str:
    """16 hex digits that depend on documents, tokenizer, split, seed and sequence length; empty without a dataset."""
    if dataset is None:
        return ""
    digest = hashlib.sha256()
    for index in range(SAMPLES):
        sample = dataset[index]
        digest.update(sample.tokens.tobytes())
        if sample.loss_mask is not None:
            digest.update(sample.loss_mask.tobytes())
    return digest.hexdigest()[:16]
