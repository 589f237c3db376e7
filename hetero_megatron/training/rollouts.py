"""Answers to learn from (--grpo): sampled by the ranks of the plan with the weights of the step, judged by the user's
function, and handed to the step as its batch.

All of it is a function of the weights, the seed and the number of the step's first sample. So a run that goes on from a
checkpoint samples again what one that was killed had sampled, under any plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_megatron.comm.group import together
from hetero_megatron.data.prompts import PROMPT, Prompt, Prompts, row_of
from hetero_megatron.data.sample import Sample
from hetero_megatron.data.tokenizers import Tokenizer, plain_text
from hetero_megatron.generation import Decoder, Sampling, SharedWeights
from hetero_megatron.generation.settings import read_settings
from hetero_megatron.pipeline.rollout_loss import RolloutLoss
from hetero_megatron.pipeline.stage_work import StepResult
from hetero_megatron.pipeline.step_work import Fetch
from hetero_megatron.plans import pipeline_samples
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.training.agreement import check_agreement
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.rewards import RewardFunction
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.utils.files import parse_json, read_bytes
from hetero_megatron.utils.text import notice_line


@dataclass(frozen=True)
class Rollout:
    """The answers of a batch, group after group.

    Attributes:
        first: global index of the first sample of the step that it was sampled for.
        cut: whether an answer has no end.
        weights: of each answer's tokens.
    """

    first: int
    prompts: Sequence[Prompt]
    answers: Sequence[Sequence[int]]
    rewards: Sequence[float]
    cut: Sequence[bool]
    advantages: Sequence[float]
    weights: Sequence[float]


class Rollouts:
    """Built on every rank of the plan, and asked before each step; as a data set, the rows of the step.

    Args:
        size: answers of a step.
        reward: on the first rank.
    """

    def __init__(
        self, g: Grpo, runtime: Runtime, decoder: Decoder, prompts: Prompts, size: int, tokenizer: Tokenizer,
        sampling: Sampling, reward: RewardFunction | None,
    ) -> None:  # fmt: skip
        self.grpo, self.runtime, self.prompts, self.size = g, runtime, prompts, size
        self._decoder, self._tokenizer, self._sampling, self._reward = decoder, tokenizer, sampling, reward
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
        if not self.grpo.beta or first > self.rollout.first:
            return None
        recording = self._loss.record() if self._loss is not None else nullcontext()
        return self.runtime.record_reference(fetch, first, size, recording)

    def facts(self) -> Mapping[str, float]:
        """Of the answers of the step; see :class:`~hetero_megatron.training.runtime_options.StepHooks`."""
        rollout = self.rollout
        assert rollout is not None
        return self.grpo.summary(rollout.rewards, [len(answer) for answer in rollout.answers], rollout.cut)

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
        g = self.grpo
        asked = first // (g.iterations * g.group_size)  # by the steps before
        chosen = [self.prompts.prompt(asked + i) for i in range(self.size // g.group_size)]
        prompts = [prompt for prompt in chosen for _ in range(g.group_size)]
        answers = self._sampled([prompt.ids for prompt in prompts], first)
        rewards = self._judged(prompts, answers)
        lengths = [len(answer) for answer in answers]
        cut = [answer[-1] not in self._sampling.ends for answer in answers]
        return Rollout(first, prompts, answers, rewards, cut, g.advantages(rewards), g.weights(lengths))

    def _sampled(self, prompts: Sequence[Sequence[int]], first: int) -> list[list[int]]:
        """An answer to each prompt: each pipeline samples those of the rows that it trains on."""
        decoder, runtime = self._decoder, self.runtime
        runtime.comm.activity = "sampling answers"
        decoder.refresh()
        start, stop = pipeline_samples(runtime.here.plan, len(prompts))[decoder.place.pipeline]
        local_answers: list[list[int]] = []
        for a in range(start, stop if decoder.works else start, self.grpo.rows):
            batch = prompts[a : min(a + self.grpo.rows, stop)]
            decoder.rows.length = max(map(len, batch)) + self.grpo.max_new_tokens
            local_answers += decoder.generate(batch, first + a, self.grpo.max_new_tokens, self._sampling)
        decoder.drop_cache()
        leads = decoder.works and decoder.place.stage == 0 and decoder.place.tp_rank == 0
        mine = decoder.place.pipeline, local_answers if leads else []
        every = decoder.world.gather_objects(mine, tuple[int, list[list[int]]])
        return [answer for _, answers in sorted(every, key=lambda told: told[0]) for answer in answers]

    def _judged(self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> list[float]:
        """Rewards, from the first rank's process to all; UserError on all of them."""
        self.runtime.comm.activity = "waiting for rewards"

        def judge() -> list[float]:
            return [] if self._reward is None else self._reward(self._columns(prompts, answers), len(answers))

        return list(together(self.runtime.world, judge, list[float])[0])

    def _columns(self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """What TRL gives a reward function: texts, or messages where the prompt has some, and the records' columns."""
        ends, columns = self._sampling.ends, dict[str, list[Any]]()
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


def add_rollouts(config: RunConfig, runtime: Runtime, data: NodeData) -> None:
    """Have each step of ``runtime`` begin with sampled answers. Called on all ranks of the plan.

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
    built = runtime.stage_model
    params = dict(built.module.named_parameters())
    decoder = Decoder(
        runtime.here.plan, config.spec, runtime.comm, built.dtype, SharedWeights(params, built.scales),
        config.plan.seq_length, built.kernels,
    )  # fmt: skip
    ends = _ends(config, tokenizer)
    if not ends and world.index == 0:
        print(notice_line(f"no token id is known to end an answer: all have {g.max_new_tokens} tokens"), flush=True)
    sampling = Sampling(1.0, seed=config.seed, ends=ends)
    size = config.plan.global_batch_size
    rollouts = Rollouts(g, runtime, decoder, prompts, size, tokenizer, sampling, next(iter(started), None))
    data.wrapped[id(prompts)] = rollouts
    data.on_close.append(rollouts.close)
    runtime.hooks.before_forward, runtime.hooks.facts = rollouts.before_forward, rollouts.facts


def _ends(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
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
