"""Losses of labelled answers (KTO) under any plan: values and gradients are those of transformers and peft in one
process, one answer at a time, with the formulas of TRL's KTOTrainer (``trl_loss`` is written after Ethayarajh et al.
2024; tests/slow/test_trl.py compares with TRL itself), fp64. The estimate of the divergence is the mean over mismatched
prompts and answers of the whole global batch, whatever the plan; TRL's is that of its processes' batches together."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch, BatchOptions, make_batch
from hetero_megatron.data.chat.packing import packed_sample
from hetero_megatron.data.sample import Sample
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, adapted
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.spec.preference import Preference, shown_means
from hetero_megatron.training.labelled import LabelledSteps
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.reference import _compute
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.distributed.training.test_distillation import UNEVEN
from tests.distributed.training.test_preference import LR, log_probabilities, sgd
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.peft_reference import adapter_values, keep_apart, peft_model, peft_values
from tests.support.pool import shared_pool
from tests.support.random_plans import random_model, random_plan
from tests.support.selection import quick
from tests.support.small_plans import LLAMA

STEPS = 2
FACTS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
Answers = list[tuple[np.ndarray, np.ndarray]]


class RandomExamples:
    """Samples of one to four labelled answers of unequal lengths; a function of (seed, index % 6), so that a batch may
    have a sample twice."""

    def __init__(self, seed: int, length: int, vocab: int) -> None:
        self.seed, self.length, self.vocab = seed, length, vocab

    def answers(self, index: int) -> tuple[Answers, Answers, list[bool]]:
        """(ids, counts) of examples, and of their prompts with others' answers; labels."""
        rng = np.random.default_rng([self.seed, index % 6])
        own, mixed, labels, left = Answers(), Answers(), list[bool](), self.length
        while left >= 4 and len(own) < 4:
            size = int(rng.integers(3, min(left, 12) + 1))
            prompt = rng.integers(0, self.vocab, rng.integers(1, size))
            for to, total in ((own, size), (mixed, int(rng.integers(len(prompt) + 1, size + 1)))):
                ids = np.concatenate([prompt, rng.integers(0, self.vocab, total - len(prompt))])
                to.append((ids, np.arange(total) >= len(prompt)))
            labels.append(bool(rng.random() < 0.5))
            left -= size
        return own, mixed, labels

    def __getitem__(self, index: int) -> Sample:
        own, mixed, labels = self.answers(index)
        more: dict[str, Any] = {"pairs": tuple(10 * (index % 6) + i for i in range(len(own))), "desired": tuple(labels)}
        first, other = (packed_sample(answers, self.length, 0)._replace(**more) for answers in (own, mixed))
        return first._replace(mismatched=other)

    def fetch(self, indices: Any) -> Batch:
        return make_batch(self, indices, BatchOptions(True, True))


def run_rank(
    comm: Comm, made: Plan, spec: ModelSpec, initial: dict[str, np.ndarray], p: Preference, seed: int, logits_bytes: int
) -> tuple[list[list[float]], list[tuple[str, Box, np.ndarray]]]:
    made = plan_for(made, comm.islands)
    compiled = CompiledPlan(made, spec, pairs=True)
    comm.create_groups(compiled.groups)
    if comm.rank not in made.ranks:
        return [], []

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    options = RuntimeOptions(preference=p, logits_bytes=logits_bytes)
    runtime = Runtime(compiled, comm, torch.float64, initialize, sgd, options=options)
    data, size = RandomExamples(seed, made.seq_length, spec.vocab_size), made.global_batch_size
    before = LabelledSteps(runtime)
    if not p.in_step:
        known: dict[int, tuple[float, float]] = {}
        _compute(runtime, data.fetch, data, STEPS * size, size, known)
        before.use(known)
    runtime.hooks.before_forward = before.before_forward
    stats = []
    for step in range(STEPS):
        loss, count, facts = runtime.evaluate_pairs(data.fetch, step * size, size)
        found = runtime.train_step(data.fetch, step * size, size, LR, clip_grad=1.0, loss_scale=4.0, step=step + 1)
        assert found.tokens == count and abs(loss / count - found.loss) <= 1e-12 * abs(found.loss)
        np.testing.assert_allclose(list(facts.values()), list(found.facts.values()), rtol=1e-9, atol=1e-12)
        stats.append([found.loss, found.grad_norm, found.tokens, *(shown_means(found.facts)[name] for name in FACTS)])
    return stats, [(n, runtime.stage_model.boxes[n], q.detach().numpy().copy()) for n, q in runtime.sync.params.items()]


def trl_loss(
    p: Preference, ratio: torch.Tensor, apart: torch.Tensor, desired: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, divergence) as KTOTrainer.kto_loss says; ``ratio``, ``apart``: policy less reference of the answers,
    and of the mismatched ones."""
    chosen, rejected = ratio[desired], ratio[~desired]
    if p.loss == "kto":
        kl = apart.mean().detach().clamp(min=0)
        good, bad = 1 - torch.sigmoid(p.beta * (chosen - kl)), 1 - torch.sigmoid(p.beta * (kl - rejected))
    else:
        kl = torch.zeros(())
        good, bad = 1 - torch.sigmoid(p.beta * chosen), torch.sigmoid(p.beta * rejected)
    return torch.cat([p.desirable * good, p.undesirable * bad]), kl


def mean(values: torch.Tensor) -> float:
    return values.mean().item() if len(values) else 0.0


def check(
    config: dict[str, Any], made: dict[str, Any], lora: Lora | None, p: Preference, seed: int, logits_bytes: int
) -> None:
    model, spec = make_hf(config, seed)
    initial = {n: t.detach().clone().numpy() for n, t in hf_to_logical(model, spec).items()}
    if lora is not None:
        spec = adapted(spec, lora)
        initial |= adapter_values(spec, seed)
        model = peft_model(model, spec, initial)
        keep_apart(model, spec)
    params = [q for q in model.parameters() if q.requires_grad]
    optimizer, chosen = torch.optim.SGD(params, lr=LR), plan_from_dict(made, spec)
    data, size, wanted = RandomExamples(seed, chosen.seq_length, spec.vocab_size), chosen.global_batch_size, []
    batches = [[data.answers(i) for i in range(step * size, (step + 1) * size)] for step in range(STEPS)]
    flat = [[[a for row in batch for a in row[part]] for part in range(3)] for batch in batches]
    with torch.no_grad(), model.disable_adapter() if lora is not None else nullcontext():
        references = [[log_probabilities(model, batch[part]) for part in range(2)] for batch in flat]
    for (own, mixed, labels), (of_own, of_mixed) in zip(flat, references, strict=True):
        optimizer.zero_grad()
        with torch.no_grad():
            apart = log_probabilities(model, mixed) - of_mixed
        policy, desired = log_probabilities(model, own), torch.tensor(labels)
        losses, kl = trl_loss(p, policy - of_own, apart, desired)
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        rewards = p.beta * (policy - of_own).detach()
        means = [mean(x[side]) for x in (rewards, policy.detach()) for side in (desired, ~desired)]
        facts = [*means[:2], means[0] - means[1], *means[2:], kl.item()]
        wanted.append([losses.mean().item(), float(norm), len(losses), *facts])
    weights = peft_values(model, spec) if lora is not None else hf_to_logical(model, spec)
    ranks = [r for r in shared_pool().run(run_rank, chosen, spec, initial, p, seed, logits_bytes) if r[0]]
    assert len(ranks) == len(chosen.ranks)
    for stats, values in ranks:
        np.testing.assert_allclose(stats, wanted, rtol=1e-9, atol=1e-11, err_msg=f"{p} {made}")
        for name, box, found in values:
            error = np.abs(found - weights[name].detach().numpy()[box.slices()]).max(initial=0.0)
            assert error <= 1e-9, (name, error, p, made)


@pytest.mark.slow
def test_uneven_plan() -> None:
    """Whole with the reference before the first step, and as adapters with it in each, head and loss in chunks."""
    check(LLAMA, UNEVEN, None, Preference("kto", 0.7, desirable=1.5, undesirable=0.5), 5, LOGITS_BYTES)
    check(LLAMA, UNEVEN, Lora(2, 4.0), Preference("kto", 0.3, in_step=True), 6, 4000)
    check(LLAMA, UNEVEN, Lora(2, 4.0), Preference("apo_zero_unpaired", 0.3, in_step=True), 7, LOGITS_BYTES)


@pytest.mark.parametrize("seed", quick(range(4), (), [1]))
def test_random_plans(seed: int) -> None:
    rng = random.Random(seed + 700)
    config = random_model(rng)
    while config["model_type"] == "gpt2":
        config = random_model(rng)
    heads, layers, length = config["num_attention_heads"], config["num_hidden_layers"], rng.randint(12, 20)
    lora = Lora(2, 4.0) if seed % 2 else None
    p = Preference("kto", rng.choice([0.1, 0.8]), desirable=1.2, in_step=lora is not None)
    made = random_plan(rng, layers, heads, length, ranks=rng.choice([1, 2, 3, 4]))
    check(config, made, lora, p, seed, rng.choice([LOGITS_BYTES, 4000]))
