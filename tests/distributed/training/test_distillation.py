"""Distillation under any plan: losses, facts, gradients and weights are those of transformers' models in one process, by
the published formulas over whole rows of logits, fp64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch, BatchOptions, make_batch
from hetero_megatron.data.sample import Sample
from hetero_megatron.layout import Box
from hetero_megatron.ops import default_kernels
from hetero_megatron.pipeline.distillation import DistillationLoss
from hetero_megatron.pipeline.stage_model import Initialize, RankStage
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import plan_beside
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, adapted
from hetero_megatron.spec.distillation import FACTS, LOSSES, Distillation
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.training.forward_model import Teacher
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.peft_reference import adapter_values, keep_apart, peft_model, peft_values
from tests.support.pool import shared_pool
from tests.support.random_plans import random_model, random_plan
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

STEPS, LR = 2, 0.5
Values = dict[str, np.ndarray]


class RandomTokens:
    """Rows of random tokens, of which about two thirds count; a function of (seed, index)."""

    def __init__(self, seed: int, length: int, vocab: int) -> None:
        self.seed, self.length, self.vocab = seed, length, vocab

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng([self.seed, index])
        mask = rng.random(self.length) < 0.7
        mask[0] = True
        return Sample(rng.integers(0, self.vocab, self.length + 1), np.zeros(1, np.int32), mask)

    def fetch(self, indices: Any) -> Batch:
        return make_batch(self, indices, BatchOptions())


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=LR)


def from_values(values: Values) -> Initialize:
    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(values[tensor.name][box.slices()])

    return initialize


def run_rank(
    comm: Comm, made: Plan, spec: ModelSpec, initial: Values, other: ModelSpec, teacher: Values, d: Distillation,
    seed: int, logits_bytes: int,
) -> tuple[list[list[float]], list[tuple[str, Box, np.ndarray]]]:  # fmt: skip
    made = plan_for(made, comm.islands)
    compiled, beside = CompiledPlan(made, spec), CompiledPlan(plan_beside(made, spec, other), other)
    comm.create_groups([*compiled.groups, *(set(beside.forward_groups) - set(compiled.groups))])
    if comm.rank not in made.ranks:
        return [], []
    options = RuntimeOptions(distillation=d, logits_bytes=logits_bytes)
    runtime = Runtime(compiled, comm, torch.float64, from_values(initial), sgd, options=options)
    distilled = runtime.loss if isinstance(runtime.loss, DistillationLoss) else None
    here = RankStage(beside.plan, other, comm.rank)
    kernels = default_kernels(other, here.share, here.stage.head, torch.float64, tp=here.unit.tp, tiled=here.tiled)
    speaker = Teacher(beside, comm, torch.float64, from_values(teacher), kernels, distilled)
    runtime.hooks.before_forward = speaker.before_forward
    data, size = RandomTokens(seed, made.seq_length, spec.vocab_size), made.global_batch_size
    stats = []
    for step in range(STEPS):
        loss, count, facts = runtime.evaluate_pairs(data.fetch, step * size, size)
        found = runtime.train_step(data.fetch, step * size, size, LR, clip_grad=1.0, loss_scale=4.0, step=step + 1)
        assert found.tokens == count and abs(loss / count - found.loss) <= 1e-12 * abs(found.loss)
        np.testing.assert_allclose(list(facts.values()), list(found.facts.values()), rtol=1e-9, atol=1e-12)
        stats.append([found.loss, found.grad_norm, found.tokens, *(found.facts[name] for name in FACTS)])
    return stats, [(n, runtime.stage_model.boxes[n], p.detach().numpy().copy()) for n, p in runtime.sync.params.items()]


def divergence(student: torch.Tensor, teacher: torch.Tensor, d: Distillation) -> torch.Tensor:
    """Of rows of log-probabilities, as torch and TRL's GKDTrainer (generalized_jsd_loss) have it."""
    if d.loss == "forward_kl":
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    if d.loss == "reverse_kl":
        return F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
    beta = d.js_beta
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    toward, away = (F.kl_div(mixture, x, reduction="none", log_target=True).sum(-1) for x in (teacher, student))
    return beta * toward + (1 - beta) * away


def reference(
    model: Any, teacher: Any, params: list[Any], data: RandomTokens, size: int, d: Distillation
) -> list[list[float]]:
    optimizer, wanted = torch.optim.SGD(params, lr=LR), []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = data.fetch(range(step * size, (step + 1) * size))
        assert batch.loss_mask is not None
        logits = model(input_ids=batch.tokens, use_cache=False).logits[batch.loss_mask]
        with torch.no_grad():
            other = teacher(input_ids=batch.tokens, use_cache=False).logits[batch.loss_mask]
        plain = F.cross_entropy(logits, batch.labels[batch.loss_mask])
        apart = divergence(*((x / d.temperature).log_softmax(-1) for x in (logits, other)), d).mean()
        loss = (1 - d.weight) * plain + d.weight * d.temperature**2 * apart
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        wanted.append([loss.item(), float(norm), int(batch.loss_mask.sum()), plain.item(), apart.item()])
    return wanted


def check(
    config: dict[str, Any], larger: dict[str, Any], made: dict[str, Any], lora: Lora | None, d: Distillation, seed: int,
    logits_bytes: int,
) -> None:
    model, spec = make_hf(config, seed)
    teacher, other = make_hf(larger, seed + 1)
    initial, known = ({n: t.detach().clone().numpy() for n, t in hf_to_logical(*each).items()}
                      for each in ((model, spec), (teacher, other)))  # fmt: skip
    if lora is not None:
        spec = adapted(spec, lora)
        initial |= adapter_values(spec, seed)
        model = peft_model(model, spec, initial)
        keep_apart(model, spec)
    params = [q for q in model.parameters() if q.requires_grad]
    chosen = plan_from_dict(made, spec)
    data = RandomTokens(seed, chosen.seq_length, spec.vocab_size)
    wanted = reference(model, teacher, params, data, chosen.global_batch_size, d)
    weights = peft_values(model, spec) if lora is not None else hf_to_logical(model, spec)
    ranks = shared_pool().run(run_rank, chosen, spec, initial, other, known, d, seed, logits_bytes)
    ranks = [r for r in ranks if r[0]]
    assert len(ranks) == len(chosen.ranks)
    for stats, values in ranks:
        np.testing.assert_allclose(stats, wanted, rtol=1e-9, atol=1e-11, err_msg=f"{d} {made}")
        for name, box, found in values:
            error = np.abs(found - weights[name].detach().numpy()[box.slices()]).max(initial=0.0)
            assert error <= 1e-9, (name, error, d, made)


UNEVEN = plan([
    pipe(1, 2, stage([0, 1], [0, 3], context=[{"ranks": [0, 1], "tokens": [11, 7], "heads": [2, 4]}])),
    pipe(2, 1, stage([2], [0, 2]), stage([3, 4], [2, 3], tp=2, tp_split=[2, 1])),
]) | {"seq_length": 18}  # fmt: skip
LARGER = LLAMA | {"num_hidden_layers": 6, "hidden_size": 48, "intermediate_size": 33, "head_dim": 8}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_larger_teacher_on_the_same_ranks(loss: str) -> None:
    """Beside two pipelines with unequal shares, one of context groups with unequal tokens, one with an uneven TP cut;
    whole, and as adapters with head and loss in chunks."""
    d = Distillation(loss, 0.7, 2.0, 0.3)
    check(LLAMA, LARGER, UNEVEN, None, d, 3, LOGITS_BYTES)
    check(LLAMA, LARGER, UNEVEN, Lora(2, 4.0), replace(d, weight=1.0, temperature=1.0), 4, 20_000)
