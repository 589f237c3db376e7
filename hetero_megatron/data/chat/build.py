"""The data sets of a fine-tuning run from its flags."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hetero_megatron.data.blend import BlendedDataset
from hetero_megatron.data.cache import Log
from hetero_megatron.data.chat.encode import ChatEncoder
from hetero_megatron.data.chat.overlong import Overlong
from hetero_megatron.data.chat.packed import PackedConversations, PackedExamples, PackedPairs, encode_store
from hetero_megatron.data.chat.records import RecordSource, find_records
from hetero_megatron.data.chat.stream import WINDOW, StreamedConversations
from hetero_megatron.data.config import DataConfig
from hetero_megatron.data.indexed import TokenStore
from hetero_megatron.data.sample import Dataset, Sample
from hetero_megatron.data.splits import SplitPaths, check_stream, find_split, split_dataset
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_text
from hetero_megatron.utils.text import plural


@dataclass
class ChatData:
    """Builds the data set of each split.

    Args:
        limit: rows of the model's embedding.
        keep: samples before the newest one that a stream must still give.
    """

    config: DataConfig
    seq_length: int
    seed: int
    tokenizer: Tokenizer
    limit: int
    log: Log
    keep: int = 0
    _stores: dict[str, TokenStore] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)  # number of each path's first pair

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            raise UserError(
                "conversations need a tokenizer with a chat template", field="--tokenizer-type",
                value=self.tokenizer.name, accepted="--tokenizer-model DIR (or --load-hf with a tokenizer in it)",
            )  # fmt: skip
        self._tokens = self.tokenizer
        template, name = read_template(self.config.chat_template, self.tokenizer)
        self.encoder = ChatEncoder(self.tokenizer, template, name, self.config.sft_loss == "all")

    @property
    def eod(self) -> int | None:
        return self.tokenizer.eod

    def split(self, which: int) -> Dataset | None:
        """The data set of one split (train, valid, test): one, or a blend; None: there is nothing to test on."""
        split = find_split(self.config, which)
        if split is None:
            return None
        if self.config.reads_stream:
            return self._streams(split)
        return split_dataset(split, partial(self._packed, split), lambda data: data.num_packs)

    def _records(self, path: str, flag: str, streaming: bool = False) -> RecordSource:
        records = find_records(path, flag, streaming)
        if records.notice:
            self.log(records.notice)
        return records

    def _store(self, path: str, flag: str) -> TokenStore:
        if path not in self._stores:
            records, per = self._records(path, flag), 2 if self.config.items == "pair" else 1
            self._first[path] = sum(store.num_documents // per for store in self._stores.values())
            self._stores[path] = encode_store(
                records, self.encoder, self.config.data_cache_path, self.limit, self.log, self.config.items
            )
        return self._stores[path]

    def _packed(self, split: SplitPaths, path: str) -> PackedConversations | None:
        store, item = self._store(path, split.flag), self.config.items
        documents_per_item = 2 if item == "pair" else 1
        item_range = split.documents(store.num_documents // documents_per_item, path, item)
        if item_range is None:
            return None
        documents = (documents_per_item * item_range[0], documents_per_item * item_range[1])
        overlong = Overlong(self.config.overlong_samples, self.seq_length, item)
        pack_options = (self.seq_length, self.seed, self._tokens.pad, overlong, not self.config.no_packing)
        kinds = {"pair": PackedPairs, "example": PackedExamples}
        data = (
            kinds[item](store, documents, *pack_options, self._first[path]) if item in kinds
            else PackedConversations(store, documents, *pack_options)
        )  # fmt: skip
        self.log(
            f"data: {split.name}: {plural(data.num_conversations, item)} of {path} in "
            f"{plural(data.num_packs, 'sample')}, {data.fill:.0%} full"
        )
        if report := overlong.report(f"{split.name}: {path}"):
            self.log(report)
        return data

    def _streams(self, split: SplitPaths) -> Dataset:
        paths, weights, flag = split.paths, split.weights, split.flag
        check_stream(split, sft=True)
        streams = [
            StreamedConversations(
                self._records(path, flag, streaming=True), self.encoder, self.seq_length, self.seed + (i << 32),
                self._tokens.pad, Overlong(self.config.overlong_samples, self.seq_length),
                not self.config.no_packing, self.config.shuffle_buffer, self.limit, max(WINDOW, self.keep), self.log,
            )  # fmt: skip
            for i, path in enumerate(paths)
        ]
        return StreamBlend(streams, weights or [1.0], flag)


def read_template(path: str | None, tokenizer: HuggingFaceTokenizer) -> tuple[str | None, str]:
    """(what :class:`ChatEncoder` takes for --chat-template, its name): the text of a file, or the name of one of the
    tokenizer's templates."""
    if path is None:
        return None, ""
    templates = tokenizer.chat_templates
    if isinstance(templates, Mapping) and path in templates and not os.path.exists(path):
        return path, path
    return read_text(Path(path), "--chat-template"), path


class StreamBlend(BlendedDataset):
    """One stream or a blend of them; its state is that of each at the sample where it is."""

    kind = "conversations"

    def __init__(self, parts: Sequence[StreamedConversations], weights: Sequence[float], field: str) -> None:
        super().__init__(parts, weights, field)
        self._streams = parts

    def state_dict(self, sample: int) -> dict[str, Any]:
        """JSON; ``sample``: of the blend."""
        return {"sample": sample, "parts": [p.state_dict(n) for p, n in zip(self._streams, self.taken(sample))]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        states = state["parts"]
        if len(states) != len(self._streams):
            raise UserError("the checkpoint was made with another number of streams", field="--data-path")
        for stream, state_of_stream in zip(self._streams, states):
            stream.load_state_dict(state_of_stream)


def show_sample(sample: Sample, tokenizer: Tokenizer, most: int = 1200) -> str:
    """The first conversations of a sample as text, with what counts in the loss in ⟦ ⟧; ``most`` characters."""
    assert sample.loss_mask is not None
    counts = np.concatenate([[False], sample.loss_mask])
    ends = np.flatnonzero(np.diff(sample.documents, append=len(sample.tokens)))
    last = int(sample.documents[min(len(ends), 2)]) if len(sample.documents) > 2 else len(sample.tokens)
    pieces, start = [], 0
    edges = [*np.flatnonzero(np.diff(counts[:last])) + 1, last]
    for edge in edges:
        text = tokenizer.decode(sample.tokens[start:edge])
        pieces.append(f"⟦{text}⟧" if counts[start] else text)
        start = edge
    text = "".join(pieces)
    shown_text = text if len(text) <= most else f"{text[:most]} …"
    total = f"{int(counts.sum()):,} of its {len(sample.tokens) - 1:,} tokens"
    return f"data: the first sample; what stands in ⟦ ⟧ counts in the loss ({total}):\n{shown_text}"
