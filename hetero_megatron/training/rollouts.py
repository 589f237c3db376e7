"""Answers to learn from (--grpo): sampled by the ranks of the plan with the weights of the step, or by a generator,
judged by the user's function, and handed to the step as its batch.

All of it is a function of the weights, the seed and the number of the step's first sample. So a run that goes on from a
checkpoint samples again what one that was killed had sampled, under any plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hetero_megatron.comm.group import together
from hetero_megatron.data.prompts import PROMPT, Prompt, Prompts, row_of
from hetero_megatron.data.sample import Sample
from hetero_megatron.data.tokenizers import Tokenizer, plain_text
from hetero_megatron.generation import Decoder, Sampling, SharedWeights
from hetero_megatron.pipeline.rollout_loss import RolloutLoss
from hetero_megatron.pipeline.stage_work import StepResult
from hetero_megatron.pipeline.step_work import Fetch
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.training.agreement import check_agreement
from hetero_megatron.training.answers import OwnSampler, PlanSampler, Sampler, chosen_prompts, ends_of_answers
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.rewards import RewardFunction
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.utils.text import notice_line

if TYPE_CHECKING:
    from hetero_megatron.training.role_client import RoleMeetings


@dataclass(frozen=True)
class Rollout:
    """The answers of a batch, group after group.

    Attributes:
        first: global index of the first sample of the step that it was sampled for.
        cut: whether an answer has no end.
        weights: of each answer's tokens.
        logps: of each answer, log-probabilities of its tokens, where it was sampled by other weights than those of the
            step.
    """

    first: int
    prompts: Sequence[Prompt]
    answers: Sequence[Sequence[int]]
    rewards: Sequence[float]
    cut: Sequence[bool]
    advantages: Sequence[float]
    weights: Sequence[float]
    logps: Sequence[Sequence[float]] = ()

    def sampled_by(self, length: int) -> torch.Tensor | None:
        """``RolloutLoss.sampled``, of rows of ``length`` tokens."""
        if not self.logps:
            return None
        table = torch.zeros(len(self.answers), length, dtype=torch.float64)
        for row, prompt, logps in zip(table, self.prompts, self.logps, strict=True):
            begin = len(prompt.ids) - 1
            row[begin : begin + len(logps)] = torch.tensor(logps, dtype=torch.float64)
        return table


class Rollouts:
    """Built on every rank of the plan, and asked before each step; as a data set, the rows of the step.

    Args:
        size: answers of a step.
        ends: ids that end an answer.
        reward: on the first rank.
    """

    def __init__(
        self, g: Grpo, runtime: Runtime, sampler: Sampler, prompts: Prompts, size: int, tokenizer: Tokenizer,
        ends: Sequence[int], reward: RewardFunction | None,
    ) -> None:  # fmt: skip
        self.grpo, self.runtime, self.prompts, self.size = g, runtime, prompts, size
        self._sampler, self._tokenizer, self._ends, self._reward = sampler, tokenizer, ends, reward
        self._loss = runtime.loss if isinstance(runtime.loss, RolloutLoss) else None
        self.rollout: Rollout | None = None
        self._first = 0  # global index of the first sample of the step

    def before_forward(self, fetch: Fetch, first: int, size: int) -> StepResult | None:
        """See :class:`~hetero_megatron.training.runtime_options.StepHooks`."""
        self._first = first
        if self._loss is not None:
            self._loss.first = first
        if self.rollout is None or first >= self.rollout.first + self.size * self.grpo.iterations:
            if self._loss is not None:
                self._loss.begin_rollout()
            self.rollout = self._made(first)
            if self._loss is not None:
                self._loss.sampled = self.rollout.sampled_by(self.prompts.length)
        if not self.grpo.beta or first > self.rollout.first:
            return None
        recording = self._loss.record() if self._loss is not None else nullcontext()
        return self.runtime.record_reference(fetch, first, size, recording)

    def facts(self) -> Mapping[str, float]:
        """Of the answers of the step; see :class:`~hetero_megatron.training.runtime_options.StepHooks`."""
        rollout = self.rollout
        assert rollout is not None
        facts = self.grpo.summary(rollout.rewards, [len(answer) for answer in rollout.answers], rollout.cut)
        staleness = self._sampler.staleness()
        return facts if staleness is None else {**facts, "staleness": float(staleness)}

    def __getitem__(self, index: int) -> Sample:
        length, pad, rollout = self.prompts.length, self.prompts.pad, self.rollout
        if rollout is None:  # a rehearsal, before anything was sampled
            prompt = self.prompts.prompt(0).ids
            return row_of(prompt, [pad], length, pad)._replace(judged=(0.0, 1.0))
        place = index - self._first
        row = row_of(rollout.prompts[place].ids, rollout.answers[place], length, pad)
        return row._replace(judged=(rollout.advantages[place], rollout.weights[place]))

    def close(self) -> None:
        """End the process of the reward function."""
        if self._reward is not None:
            self._reward.close()

    def _made(self, first: int) -> Rollout:
        """Sample and judge. Called on all ranks of the plan."""
        g, prompts = self.grpo, chosen_prompts(self.grpo, self.prompts, first, self.size)
        self.runtime.comm.activity = "sampling answers"
        sampled = self._sampler.sample([prompt.ids for prompt in prompts], first)
        answers, logps = sampled.answers, sampled.logps if self._sampler.staleness() else []
        rewards = self._judged(prompts, answers)
        lengths = [len(answer) for answer in answers]
        cut = [answer[-1] not in self._ends for answer in answers]
        return Rollout(first, prompts, answers, rewards, cut, g.advantages(rewards), g.weights(lengths), logps)

    def _judged(self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> list[float]:
        """Rewards, from the first rank's process to all; UserError on all of them."""
        self.runtime.comm.activity = "waiting for rewards"

        def judge() -> list[float]:
            return [] if self._reward is None else self._reward(self._columns(prompts, answers), len(answers))

        return list(together(self.runtime.world, judge, list[float])[0])

    def _columns(self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """What TRL gives a reward function: texts, or messages where the prompt has some, and the records' columns."""
        ends, columns = self._ends, dict[str, list[Any]]()
        for name in dict.fromkeys(key for prompt in prompts for key in prompt.record):
            columns[name] = [prompt.record.get(name) for prompt in prompts]
        asked = columns.pop(PROMPT)
        texts = [
            plain_text(self._tokenizer, answer[:-1] if answer[-1] in ends else answer) for answer in answers
        ]
        said: list[Any] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(asked, texts, strict=True)
        ]
        ids = [list(answer) for answer in answers]
        return {**columns, "prompts": asked, "completions": said, "completion_ids": ids}


def add_rollouts(config: RunConfig, runtime: Runtime, data: NodeData, generator: RoleMeetings | None) -> None:
    """Have each step of ``runtime`` begin with sampled answers. Called on all ranks of the plan.

    Args:
        generator: which samples on ranks of its own; None: these ranks do.

    Raises:
        UserError: the reward function cannot be loaded, ranks have other prompts; on all ranks.
    """
    g, prompts, tokenizer = config.grpo, data.datasets.train, data.datasets.tokenizer
    assert g is not None and isinstance(prompts, Prompts)
    world, started = runtime.world, list[RewardFunction]()
    check_agreement(world, {"prompts": prompts.fingerprint()})

    def start() -> None:
        if world.index == 0:
            started.append(RewardFunction(g.reward, g.seconds))

    together(world, start)
    ends = ends_of_answers(config, tokenizer)
    if not ends and world.index == 0:
        print(notice_line(f"no token id is known to end an answer: all have {g.max_new_tokens} tokens"), flush=True)
    sampler = _sampler(config, runtime, ends, generator)
    size = config.plan.global_batch_size
    rollouts = Rollouts(g, runtime, sampler, prompts, size, tokenizer, ends, next(iter(started), None))
    data.wrapped[id(prompts)] = rollouts
    data.on_close.append(rollouts.close)
    runtime.hooks.before_forward, runtime.hooks.facts = rollouts.before_forward, rollouts.facts


def _sampler(
    config: RunConfig, runtime: Runtime, ends: tuple[int, ...], generator: RoleMeetings | None
) -> Sampler:
    if generator is not None:
        from hetero_megatron.training.generator_client import GeneratorClient

        assert isinstance(generator, GeneratorClient)
        return generator
    g, built = config.grpo, runtime.stage_model
    assert g is not None
    decoder = Decoder(
        runtime.here.plan, config.spec, runtime.comm, built.dtype,
        SharedWeights(dict(built.module.named_parameters()), built.scales), config.plan.seq_length, built.kernels,
    )  # fmt: skip
    sampling = Sampling(1.0, seed=config.seed, ends=ends)
    return OwnSampler(PlanSampler(decoder, sampling, g.max_new_tokens, g.rows))
