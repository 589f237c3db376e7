"""Sampling answers to the prompts of a step (--grpo) on the ranks of a plan: those that train, or a generator's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from hetero_megatron.data.prompts import Prompt, Prompts
from hetero_megatron.data.tokenizers import Tokenizer
from hetero_megatron.generation import Decoder, Sampling
from hetero_megatron.generation.sampling import PromptRow
from hetero_megatron.generation.settings import read_settings
from hetero_megatron.plans import pipeline_samples
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.role_messages import Sampled
from hetero_megatron.utils.files import parse_json, read_bytes


class Sampler(Protocol):
    """Who samples; called on all ranks that train."""

    def sample(self, prompts: Sequence[Sequence[int]], first: int) -> Sampled:
        """An answer to each prompt; ``first``: global index of the first one."""

    def staleness(self) -> int | None:
        """Optimizer steps since the weights that sampled the last answers; None: they are always sampled by those of
        the step in which they are first learned from."""


def chosen_prompts(g: Grpo, prompts: Prompts, first: int, size: int) -> list[Prompt]:
    """The prompt of each answer of a step, group after group.

    Args:
        first: global index of the first answer; size: how many there are.
    """
    asked = first // (g.iterations * g.group_size)  # by the steps before
    chosen = [prompts.prompt(asked + i) for i in range(size // g.group_size)]
    return [prompt for prompt in chosen for _ in range(g.group_size)]


@dataclass(frozen=True)
class RecordedSampling(Sampling):
    """The same draws, with the log-probabilities of drawn tokens by number of the prompt, at temperature 1."""

    logps: dict[int, list[float]] = field(default_factory=dict)

    def choose(self, logits: torch.Tensor, rows: Sequence[PromptRow]) -> torch.Tensor:
        tokens = super().choose(logits, rows)
        chosen = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        for row, value in zip(rows, chosen.tolist(), strict=True):
            self.logps.setdefault(row.number, []).append(value)  # of a row that has ended, too: cut off later
        return tokens


class PlanSampler:
    """Each pipeline samples its share of the answers.

    Args:
        sampling: a :class:`RecordedSampling` where log-probabilities are wanted.
        rows: answers that a pipeline samples at once; None: as many as its micro-batches have sequences.
    """

    def __init__(self, decoder: Decoder, sampling: Sampling, max_new_tokens: int, rows: int | None = None) -> None:
        self.decoder, self._sampling, self._most = decoder, sampling, max_new_tokens
        self._rows = rows or decoder.pipeline.micro_batch_size

    def sample(self, prompts: Sequence[Sequence[int]], first: int) -> Sampled:
        """With the weights that the decoder has; as :class:`Sampler` on all ranks of its plan."""
        decoder, recorded = self.decoder, getattr(self._sampling, "logps", None)
        start, stop = pipeline_samples(decoder.plan, len(prompts))[decoder.place.pipeline]
        local_answers: list[list[int]] = []
        for a in range(start, stop if decoder.works else start, self._rows):
            batch = prompts[a : min(a + self._rows, stop)]
            decoder.rows.length = max(map(len, batch)) + self._most
            local_answers += decoder.generate(batch, first + a, self._most, self._sampling)
        decoder.drop_cache()
        local_logps: list[list[float]] = []
        if recorded is not None:
            numbered = enumerate(local_answers, first + start)
            local_logps = [recorded[number][: len(answer)] for number, answer in numbered if number in recorded]
            recorded.clear()
        place, one = decoder.place, decoder.works and decoder.place.tp_rank == 0
        leads, ends = one and place.stage == 0, one and decoder.stages[place.stage].head
        told = place.pipeline, local_answers if leads else [], local_logps if ends else []
        every = decoder.world.gather_objects(told, tuple[int, list[list[int]], list[list[float]]])
        every.sort(key=lambda of_rank: of_rank[0])
        return Sampled([a for _, answers, _ in every for a in answers], [v for _, _, logps in every for v in logps])


class OwnSampler:
    """The ranks that train sample, with the weights of the step."""

    def __init__(self, sampler: PlanSampler) -> None:
        self._sampler = sampler

    def sample(self, prompts: Sequence[Sequence[int]], first: int) -> Sampled:
        self._sampler.decoder.refresh()
        return self._sampler.sample(prompts, first)

    def staleness(self) -> None:
        return None


def ends_of_answers(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer, as TRL has them: what generation_config.json (config.json) of --load-hf says, and the
    tokenizer's."""
    ends = set[int]() if tokenizer.eod is None else {tokenizer.eod}
    for name in ("generation_config.json", "config.json") if config.load_hf is not None else ():
        path = Path(str(config.load_hf)) / name
        generation_config = parse_json(read_bytes(path), str(path)) if path.is_file() else {}
        if isinstance(generation_config, dict) and generation_config.get("eos_token_id") is not None:
            only = {"eos_token_id": generation_config["eos_token_id"]}
            ends |= {*(read_settings(only, config.spec.vocab_size, str(path), False).ends or ())}
            break
    return tuple(sorted(ends))

