"""Builds datasets from a DataConfig, without waiting for other ranks.

A tokenizer and three splits come out, each a ``Dataset`` by global sample index: made-up tokens, stored text, streams
or conversations. ``training/node_data.py`` decides which rank of a node reads a stream for the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_megatron.data.cache import Log, cache_folder, say
from hetero_megatron.data.config import SPLITS, DataConfig, build_tokenizer
from hetero_megatron.data.mock import MockDataset
from hetero_megatron.data.packing import PackedDataset
from hetero_megatron.data.sample import Blend, Dataset, StoredDataset, Stream
from hetero_megatron.data.tokenizers import NullTokenizer, Tokenizer, notices_of, required_eod
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.data.chat.build import ChatData
    from hetero_megatron.data.corpus import Corpus
    from hetero_megatron.data.indexed import TokenStore
    from hetero_megatron.data.splits import SplitPaths

SAMPLES = 4  # the first ones: windows from all over the data, because they are shuffled
PLACES, WIDTH = 1024, 64  # of stored tokens: windows of so many, spread evenly; less are hashed as a whole


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
    if isinstance(dataset, Blend):
        for part in dataset.datasets:
            yield from _stored(part)
    elif isinstance(dataset, StoredDataset):
        yield dataset.store, dataset.documents


def _spread(array: np.ndarray) -> np.ndarray:
    """All of a short array, windows of a long one, its beginning and its end among them."""
    if len(array) <= PLACES * WIDTH:
        return np.asarray(array)
    starts = np.linspace(0, len(array) - WIDTH, PLACES).astype(np.int64)
    return np.concatenate([array[start : start + WIDTH] for start in starts])


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


MOST_BYTE_ROWS = 512  # of a model that may be meant for bytes: 256, the end of a document, and padding


@dataclass(frozen=True)
class Datasets:
    """Attributes:
        train, valid, test: None if no samples were requested; ``test`` also if no data are left to test on.
        eod: id of the end-of-document token; None: the tokenizer has none.
        streams: the datasets that have a state to save.
        in_order: the data is a stream, perhaps one that another rank reads."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    tokenizer: Tokenizer
    eod: int | None
    streams: tuple[Stream, ...] = ()
    in_order: bool = False

    @property
    def vocab_size(self) -> int:
        """One more than the tokenizer's largest id; a model needs embedding rows for the ids that occur."""
        return self.tokenizer.vocab_size

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of training and validation data, see :func:`data_fingerprint`;
        empty for streams, which would be read."""
        if self.in_order:
            return {"train": "", "valid": ""}
        return {"train": data_fingerprint(self.train), "valid": data_fingerprint(self.valid)}

    @cached_property
    def corpora(self) -> Mapping[str, str]:
        """Fingerprints of the stored corpora of training and validation, see
        :func:`corpus_fingerprint`; for ranks to compare."""
        key = self.tokenizer.fingerprint
        return {"train": corpus_fingerprint(self.train, key), "valid": corpus_fingerprint(self.valid, key)}

    def read_here(self) -> Mapping[str, str]:
        """Of streams that this rank reads, see :func:`stream_fingerprint`; for the nodes to compare."""
        from hetero_megatron.data.stream_fingerprint import stream_fingerprint

        datasets = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: stream_fingerprint(dataset) for name, dataset in datasets.items()}

    def state_dict(self, consumed_train_samples: int) -> dict[str, Any]:
        """State to save besides the number of samples (JSON); empty unless streaming."""
        state: dict[str, Any] = {}
        for stream in self.streams:
            state.setdefault(stream.kind, []).append(stream.state_dict(consumed_train_samples))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; without one, streams start from the beginning."""
        for stream in self.streams:
            for saved in state.get(stream.kind, [])[:1]:
                stream.load_state_dict(saved)


def build_datasets(
    config: DataConfig,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    model_vocab_size: int | None = None,
    log: Log = say,
    keep: int = 0,
    served: Callable[[int], Dataset] | None = None,
) -> Datasets:
    """Datasets for training, validation and test.

    Args:
        num_samples: samples needed of each; 0: not built. The content does not depend on it.
        model_vocab_size: rows of the model's embedding; UserError for a token beyond them.
        log: receives progress messages.
        keep: samples before the newest one that a stream must still give.
        served: makes the dataset of a split (0: train, 1: valid, 2: test) that another rank reads, for a stream.
    """
    if seq_length < 1:
        raise UserError("must be positive", field="--seq-length", value=seq_length, accepted="an integer >= 1")
    tokenizer = config_tokenizer(config, model_vocab_size)
    for notice in notices_of(tokenizer):
        log(f"data: {notice}")
    if config.eod_mask_loss:
        required_eod(tokenizer, "--eod-mask-loss masks what follows it")
    limit = _limit(tokenizer, model_vocab_size)
    log(_tokenizer_line(config, tokenizer, limit))
    builder = _builder_of(config)(config, seq_length, seed, tokenizer, limit, log, keep)

    def make(which: int) -> Dataset | None:
        if served is None:
            return builder.split(which)
        from hetero_megatron.data.splits import find_split

        return served(which) if find_split(config, which) is not None else None

    train, valid, test = (make(i) if n else None for i, n in enumerate(num_samples))
    for name, dataset, n in zip(SPLITS, (train, valid, test), num_samples):
        if isinstance(dataset, StoredDataset):
            counts = ""
            if isinstance(dataset, PackedDataset):
                documents = plural(dataset.documents[1] - dataset.documents[0], "document")
                counts = f" of {documents}, {plural(dataset.num_tokens, 'token')}"
            log(f"data: {name}: {plural(n, 'sample')} = {plural(dataset.num_epochs(n), 'epoch')}{counts}")
    streams = (train,) if isinstance(train, Stream) else ()
    return Datasets(train, valid, test, tokenizer, builder.eod, streams, config.reads_stream)


def _builder_of(config: DataConfig) -> type[_SplitBuilder] | type[ChatData]:
    """What builds the splits: of text, or of conversations."""
    if not config.sft:
        return _SplitBuilder
    if config.grpo:
        from hetero_megatron.data.prompts import PromptData

        return PromptData
    from hetero_megatron.data.chat.build import ChatData

    return ChatData


def reads_text(config: DataConfig) -> bool:
    """Whether the data must be tokenized: neither mock data nor .bin/.idx."""
    from hetero_megatron.data.corpus import is_indexed

    paths = [p for words in (config.data_path, *map(config.paths_of, SPLITS)) for p in words or ()]
    return not config.mock_data and not any(is_indexed(p) for p in paths)


def refuse_bytes(config: DataConfig, model_vocab_size: int | None) -> None:
    """UserError if text would be read as bytes because no tokenizer was given, although the model has a larger
    vocabulary."""
    is_chosen = config.tokenizer_type is not None or not reads_text(config)
    if model_vocab_size is not None and model_vocab_size > MOST_BYTE_ROWS and not is_chosen:
        raise UserError(
            f"missing: without it text is read byte by byte (257 ids), but the model's vocabulary has "
            f"{plural(model_vocab_size, 'entry')}",
            field="--tokenizer-type",
            accepted="--tokenizer-model DIR (or another flag that names the model's tokenizer), or --tokenizer-type "
            "ByteTokenizer if bytes are meant",
        )


def _limit(tokenizer: Tokenizer, model_vocab_size: int | None) -> int:
    """Upper bound on token ids: the model's embedding rows, and for a NullTokenizer also its given vocabulary."""
    if model_vocab_size is None:
        return tokenizer.vocab_size
    is_null = isinstance(tokenizer, NullTokenizer)
    return min(model_vocab_size, tokenizer.vocab_size) if is_null else model_vocab_size


def _tokenizer_line(config: DataConfig, tokenizer: Tokenizer, rows: int) -> str:
    """What the run prints about its tokenizer."""
    source = config.tokenizer_source or ("given" if config.tokenizer_type else "by default")
    end = "without an end of document" if tokenizer.eod is None else f"{tokenizer.eod} ends a document"
    beyond_rows = tokenizer.vocab_size > rows
    beyond_text = f"; those from {rows:,} on have no row in the model and must not occur" if beyond_rows else ""
    return f"data: tokenizer {tokenizer.name} ({source}): ids 0 to {tokenizer.vocab_size - 1:,}, {end}{beyond_text}"


def config_tokenizer(config: DataConfig, model_vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a config; UserError for unintended byte tokenization."""
    refuse_bytes(config, model_vocab_size)
    kind = config.tokenizer_type
    size = config.vocab_size
    if kind is None:
        tokens_only = not reads_text(config)
        if tokens_only and size is None and model_vocab_size is not None:
            # NullTokenizer adds its end of document: inside the model's vocabulary for mock data, outside for ids
            # whose meaning we do not know.
            size = model_vocab_size - config.mock_data
        kind = "NullTokenizer" if tokens_only and size is not None else "ByteTokenizer"
        if tokens_only and not config.mock_data and (size is None or config.eod_mask_loss):
            raise UserError(
                ".bin/.idx data does not say which tokenizer made it", field="--tokenizer-type",
                accepted="the tokenizer it was made with, or NullTokenizer with --vocab-size",
            )  # fmt: skip
    return build_tokenizer(
        kind, config.tokenizer_model, config.vocab_file, config.merge_file, size, config.trust_remote_code
    )


@dataclass
class _SplitBuilder:
    config: DataConfig
    seq_length: int
    seed: int
    tokenizer: Tokenizer
    limit: int
    log: Log
    keep: int = 0
    _stores: dict[str, TokenStore] = field(default_factory=dict)

    @property
    def eod(self) -> int | None:
        """The tokenizer's; for mock data an id inside the model's vocabulary."""
        return self._mock_eod() if self.config.mock_data else self.tokenizer.eod

    def _mock_eod(self) -> int:
        last = self.limit - 1
        return last if self.tokenizer.eod is None else min(self.tokenizer.eod, last)

    def split(self, which: int) -> Dataset | None:
        """The dataset of one split: a single corpus or a blend; None: there is nothing to test on."""
        config = self.config
        if config.mock_data:  # different seeds, so that validation samples are not training samples
            return None if which == 2 else MockDataset(self.seq_length, self.seed + (which << 32), self._mock_eod())
        from hetero_megatron.data.splits import find_split, split_dataset

        split = find_split(config, which)
        if split is None:
            return None
        if config.reads_stream:
            return self._stream(split)
        return split_dataset(split, partial(self._packed, split), lambda data: data.num_tokens)

    def _packed(self, split: SplitPaths, path: str) -> PackedDataset | None:
        store = self._store(path, split.flag)
        documents = split.documents(store.num_documents, path, "document")
        if documents is None:
            return None
        return PackedDataset(
            store, documents, self.seq_length, self.seed, self.tokenizer.eod, self.limit, self._cache(), self.log,
            split.flag,
        )  # fmt: skip

    def _store(self, path: str, flag: str) -> TokenStore:
        from hetero_megatron.data.corpus import indexed_prefix, is_indexed
        from hetero_megatron.data.indexed import open_indexed
        from hetero_megatron.data.tokenize import tokenize

        if path not in self._stores:
            if path != "stdlib" and is_indexed(path):
                self._stores[path] = open_indexed(indexed_prefix(path), flag)
            else:
                self._stores[path] = tokenize(
                    self._corpus(path, flag), self.tokenizer, self.config.data_cache_path, self.log, self.limit
                )
        return self._stores[path]

    def _corpus(self, path: str, flag: str) -> Corpus:
        from hetero_megatron.data.corpus import find_corpus

        corpus = find_corpus(path, self.config.json_keys, flag)
        if notice := corpus.notice():
            self.log(notice)
        return corpus

    def _cache(self) -> Path | None:
        """The index cache folder; None unless the user gave one: building an index takes under a second per million
        documents."""
        return cache_folder(self.config.data_cache_path) if self.config.data_cache_path else None

    def _stream(self, split: SplitPaths) -> Dataset:
        from hetero_megatron.data.splits import check_stream
        from hetero_megatron.data.streaming import WINDOW, StreamingDataset

        check_stream(split, sft=False)
        corpus = self._corpus(split.paths[0], split.flag)
        corpus.check_ends()
        return StreamingDataset(corpus, self.tokenizer, self.seq_length, self.limit, max(WINDOW, self.keep))
