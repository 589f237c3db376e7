"""Prompts of reinforcement learning (--grpo): records with a prompt, and whatever else the reward function wants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hetero_megatron.data.chat.build import ChatData
from hetero_megatron.data.chat.records import Record
from hetero_megatron.data.packing import check_tokens
from hetero_megatron.data.sample import Dataset, Sample
from hetero_megatron.data.splits import find_split
from hetero_megatron.data.tokenize import encode_texts
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import plural

PROMPT = "prompt"
ACCEPTED = 'a text, or messages: [{"role": "user", "content": "…"}]'


class Prompt(NamedTuple):
    """Token ids of a prompt, and its record."""

    ids: Sequence[int]
    record: Mapping[str, Any]


class Prompts(Dataset):
    """Prompts in an order that is drawn anew for each epoch by the seed.

    As samples they are rows of ``length`` tokens, in which nothing counts.

    Args:
        pad: id for places that nobody looks at.
    """

    def __init__(self, prompts: Sequence[Prompt], length: int, seed: int, pad: int) -> None:
        self.prompts, self.length, self.seed, self.pad = prompts, length, seed, pad
        self._order = lru_cache(maxsize=2)(self._drawn)

    def prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self.prompts))
        return self.prompts[self._order(epoch)[place]]

    def __getitem__(self, index: int) -> Sample:
        return row_of(self.prompt(index).ids, [], self.length, self.pad)

    def fingerprint(self) -> str:
        """16 hex digits of all prompts and records."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.ids, prompt.record], sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def _drawn(self, epoch: int) -> list[int]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts)).tolist()  # type: ignore[no-any-return]


def row_of(prompt: Sequence[int], answer: Sequence[int], length: int, pad: int) -> Sample:
    """A prompt with an answer, whose tokens count, filled up to ``length`` + 1 tokens."""
    tokens, mask = np.full(length + 1, pad, np.int64), np.zeros(length, bool)
    end = len(prompt) + len(answer)
    tokens[:end] = [*prompt, *answer]
    mask[len(prompt) - 1 : end - 1] = bool(answer)
    return Sample(tokens, np.zeros(1, np.int32), mask)


class PromptData(ChatData):
    """Builds the prompts of a run."""

    def split(self, which: int) -> Dataset | None:
        split = find_split(self.config, which)
        if split is None:
            return None
        if len(split.paths) > 1:
            raise UserError("prompts are read from one place", field=split.flag, value=" ".join(split.paths),
                            accepted="one path")  # fmt: skip
        path, flag = split.paths[0], split.flag
        records = list(self._records(path, flag).read())
        interval = split.documents(len(records), path, "prompt")
        if interval is None:
            return None
        records = records[slice(*interval)]
        most = self.seq_length - self.config.max_new_tokens
        every = [Prompt(ids, record.value) for ids, record in zip(self._encoded(records), records, strict=True)]
        fitting = [prompt for prompt in every if len(prompt.ids) <= most]
        if not fitting:
            raise UserError(
                f"none of its {plural(len(every), 'prompt')} leaves room for --max-new-tokens "
                f"{self.config.max_new_tokens} in --seq-length {self.seq_length}", field=flag, value=path,
                accepted="shorter prompts or answers, or a longer --seq-length",
            )  # fmt: skip
        left_out = f", {len(every) - len(fitting)} left out: longer than {most} tokens" * (len(fitting) < len(every))
        self.log(f"data: {split.name}: {plural(len(fitting), 'prompt')} of {path}{left_out}")
        return Prompts(fitting, self.seq_length, self.seed, self._tokens.pad)

    def _encoded(self, records: Sequence[Record]) -> list[list[int]]:
        for record in records:
            _check(record)
        texts = [i for i, record in enumerate(records) if isinstance(record.value[PROMPT], str)]
        chats = [i for i in range(len(records)) if i not in set(texts)]
        ids_of_record: dict[int, list[int]] = {}
        if texts:
            encoded = encode_texts([records[i].value[PROMPT] for i in texts], self.tokenizer)
            ids_of_record |= {i: ids.tolist() for i, ids in zip(texts, encoded, strict=True)}
        if chats:
            ids_of_record |= zip(chats, self.encoder.prompts([records[i].value[PROMPT] for i in chats]), strict=True)
        for i, record in enumerate(records):
            if not ids_of_record[i]:
                raise UserError("becomes no token", field=PROMPT, accepted=ACCEPTED, where=record.where)
            check_tokens(np.array(ids_of_record[i]), self.limit, record.where, "--data-path", lambda _: "")
        return [ids_of_record[i] for i in range(len(records))]


def _check(record: Record) -> None:
    """UserError: there is no prompt that can be answered."""
    prompt, where = record.value.get(PROMPT), record.where
    if isinstance(prompt, str) and prompt:
        return
    if not isinstance(prompt, list) or not prompt:
        problem = "the record has no prompt" if prompt is None else "is no prompt"
        shown = {} if prompt is None else {"value": json.dumps(prompt)[:80]}
        raise UserError(problem, field=PROMPT, accepted=ACCEPTED, where=where, **shown)
    for message in prompt:
        parts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise UserError("is no message", field=PROMPT, value=json.dumps(message)[:80], accepted=ACCEPTED,
                            where=where)  # fmt: skip
    if prompt[-1]["role"] == "assistant":
        problem = "ends with the assistant's turn, so there is nothing to answer"
        raise UserError(problem, field=PROMPT, value=json.dumps(prompt[-1])[:80], accepted=ACCEPTED, where=where)
