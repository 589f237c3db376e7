"""Runs of GRPO in one process over transformers' and peft's models, beside those under a plan: the same prompts, judge,
draws and steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_megatron.data.prompts import Prompt, Prompts
from hetero_megatron.layout import Box
from hetero_megatron.spec import Lora, ModelSpec, adapted
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.spec.lora import TARGETS
from tests.support.grpo_reference import advantages, drawn, loss_of
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.peft_reference import adapter_values, keep_apart, peft_model
from tests.support.random_plans import random_plan

STEPS, LR, SEED, ENDS, ANSWER = 3, 0.7, 5, (3, 4, 5, 6), 5


class Numbers:
    """A tokenizer whose texts are ids."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Judge:
    """In place of a process."""

    def __call__(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[float]:
        assert {len(column) for column in columns.values()} == {count}
        said = zip(columns["completions"], columns["odd"], strict=True)
        return [sum(int(word) % 7 * (1 + i) for i, word in enumerate(text.split())) % 11 + odd for text, odd in said]


def prompts_of(length: int, vocab: int) -> Prompts:
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, vocab, rng.integers(1, length - ANSWER + 1)).tolist() for _ in range(7)]
    return Prompts([Prompt(ids, {"prompt": Numbers().decode(ids), "odd": len(ids) % 2}) for ids in rows], length, 3, 0)


@contextmanager
def values_of(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, parameters have other values. (A copy of the model would share what ``make_exact`` put into it.)"""
    own = [q.detach().clone() for q in params]
    for content in (values, own):
        with torch.no_grad():
            for q, value in zip(params, content, strict=True):
                q.copy_(value)
        if content is values:
            yield


@torch.no_grad()
def answers_of(model: Any, prompts: Sequence[Sequence[int]], first: int) -> list[list[int]]:
    found = []
    for number, prompt in enumerate(prompts, first):
        ids = list(prompt)
        while len(ids) < len(prompt) + ANSWER and (len(ids) == len(prompt) or ids[-1] not in ENDS):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(drawn(logits, [SEED, number, len(ids) - len(prompt)]))
        found.append(ids[len(prompt) :])
    return found


def log_probabilities(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """[answers, ANSWER], 0 after an answer's end."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows.append(F.pad(-F.cross_entropy(logits, torch.tensor(answer), reduction="none"), (0, ANSWER - len(answer))))
    return torch.stack(rows)


def wanted_of(
    model: Any, g: Grpo, data: Prompts, size: int, begin: int, seen: Mapping[int, int] | None = None
) -> tuple[list[dict[str, float]], list[list[int]]]:
    """(numbers of each step, its answers); the model is trained.

    Args:
        seen: by step whose answers are sampled, how many steps the weights have seen that sample them; None: all.
    """
    params = [q for q in model.parameters() if q.requires_grad]
    optimizer, stats, every = torch.optim.SGD(params, lr=LR), [], list[list[int]]()
    before: list[list[torch.Tensor]] = []  # values of ``params`` before each step
    for step in range(STEPS):
        before.append([q.detach().clone() for q in params])
        if step % g.iterations == 0:
            asked = (begin + step * size) // (g.iterations * g.group_size)
            chosen = [data.prompt(asked + i // g.group_size) for i in range(size)]
            prompts = [prompt.ids for prompt in chosen]
            sampled_after = step if seen is None else seen[step]
            with values_of(params, before[sampled_after]):
                answers = answers_of(model, prompts, begin + step * size)
                with torch.no_grad():
                    old = log_probabilities(model, prompts, answers)
            columns = {"completions": [Numbers().decode(a[:-1] if a[-1] in ENDS else a) for a in answers],
                       "odd": [prompt.record["odd"] for prompt in chosen]}  # fmt: skip
            rewards = torch.tensor(Judge()(columns, size), dtype=torch.float64)
            mask = torch.tensor([[float(i < len(a)) for i in range(ANSWER)] for a in answers], dtype=torch.float64)
            with torch.no_grad(), model.disable_adapter() if g.beta else nullcontext():
                reference = log_probabilities(model, prompts, answers)
        optimizer.zero_grad()
        policy = log_probabilities(model, prompts, answers)
        loss, facts = loss_of(g, policy, old, reference, advantages(g, rewards), mask)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        deviations = rewards.view(-1, g.group_size).std(1)
        facts |= {
            "reward": rewards.mean().item(),
            "reward_std": rewards.std().item(),
            "frac_reward_zero_std": (deviations == 0).double().mean().item(),
            "completions/mean_length": mask.sum(1).mean().item(),
            "completions/clipped_ratio": sum(a[-1] not in ENDS for a in answers) / size,
        }  # fmt: skip
        facts |= {} if seen is None else {"staleness": float(step - sampled_after)}
        stats.append({"loss": loss.item(), "norm": float(norm), "tokens": int(mask.sum()), **facts})
        every += answers
    return stats, every


def drawn_case(
    rng: random.Random, config: dict[str, Any], seed: int
) -> tuple[Any, ModelSpec, dict[str, np.ndarray], dict[str, Any]]:
    """(Hugging Face or, with odd seeds, peft model; its spec; initial values; a random plan)."""
    model, spec = make_hf(config, seed)
    initial = {n: t.detach().clone().numpy() for n, t in hf_to_logical(model, spec).items()}
    if seed % 2:
        targets = TARGETS if spec.moe is None else TARGETS[:4]  # attention: peft's names of experts differ by family
        lora = Lora(rng.choice([1, 3]), 4.0, tuple(rng.sample(targets, rng.randint(1, 4))), dora=rng.random() < 0.3)
        spec = adapted(spec, lora)
        initial |= adapter_values(spec, seed)
        model = peft_model(model, spec, initial)
        keep_apart(model, spec)
    made: dict[str, Any] = {}
    while not made or "'weights'" in repr(made) or made["global_batch_size"] % 2:
        made = random_plan(rng, config["num_hidden_layers"], config["num_attention_heads"], rng.randint(10, 16), 4)
    return model, spec, initial, made


def is_wanted(
    rank: tuple[list[dict[str, float]], list[list[int]], list[tuple[str, Box, np.ndarray]]], answers: list[list[int]],
    wanted: list[dict[str, float]], weights: Mapping[str, torch.Tensor], case: object,
) -> None:  # fmt: skip
    """Asserts that what a rank trained, and sampled, is that of one process."""
    stats, found_answers, values = rank
    assert found_answers == answers, case
    for numbers, expected in zip(stats, wanted, strict=True):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-11), case
    for name, box, found in values:
        error = np.abs(found - weights[name].detach().numpy()[box.slices()]).max(initial=0.0)
        assert error <= 1e-9, (name, error, case)
