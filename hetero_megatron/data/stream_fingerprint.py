"""Fingerprint of data that are read as they come, for the nodes of a job to compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from hetero_megatron.data.chat.records import FileRecords, RecordSource
from hetero_megatron.data.chat.stream import StreamedConversations
from hetero_megatron.data.corpus import Corpus
from hetero_megatron.data.sample import Blend, Dataset
from hetero_megatron.data.streaming import StreamingDataset
from hetero_megatron.errors import UserError

FILES, RECORDS = 256, 16  # of a stream that are looked into; all sizes count
PLACES, WIDTH = 1024, 64  # windows of so many bytes


def stream_fingerprint(dataset: Dataset | None) -> str:
    """16 hex digits of what a stream reads: the sizes of its files and bytes at about a thousand places all over them;
    of a data set of the hub its first records, which are read for that. Empty for other data."""
    digest, any_source = hashlib.sha256(), False
    for source, settings in _streamed(dataset):
        any_source = True
        digest.update(settings.encode())
        if isinstance(source, Corpus):
            digest.update(_of_files(source))
        else:
            for record in islice(source.read(), RECORDS):
                digest.update(json.dumps(record.value, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16] if any_source else ""


def _streamed(dataset: Dataset | None) -> Iterator[tuple[Corpus | RecordSource, str]]:
    """(what is read, how its text becomes tokens) of each part of a blend."""
    if isinstance(dataset, Blend):
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
