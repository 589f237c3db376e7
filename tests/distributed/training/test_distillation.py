"""Distillation under any plan: losses, facts, gradients and weights are those of transformers' models in one process,
by the published formulas over whole rows of logits, fp64."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch, BatchOptions, make_batch
from hetero_megatron.data.sample import LikeliestTokens, Sample
from hetero_megatron.layout import Box
from hetero_megatron.ops import default_kernels
from hetero_megatron.pipeline.distillation import DistillationLoss
from hetero_megatron.pipeline.likeliest import Likeliest, gather_rows
from hetero_megatron.pipeline.stage_model import Initialize, RankStage, StageModel
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import plan_beside
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, adapted
from hetero_megatron.spec.distillation import FACTS, LOSSES, Distillation
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.training.forward_model import ForwardModel, Teacher
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.moe_models import MOE_FAMILIES
from tests.support.peft_reference import adapter_values, keep_apart, peft_model, peft_values
from tests.support.pool import shared_pool
from tests.support.random_plans import random_model, random_plan
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

STEPS, LR, TEMPERATURE = 2, 0.5, 1.5
Values = dict[str, np.ndarray]


class RandomTokens:
    """Rows of random tokens, of which about two thirds count; a function of (seed, index)."""

    def __init__(self, seed: int, length: int, vocab: int, told: dict[int, Any] | None = None) -> None:
        self.seed, self.length, self.vocab, self.told = seed, length, vocab, told

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng([self.seed, index])
        mask = rng.random(self.length) < 0.7
        mask[0] = True
        sample = Sample(rng.integers(0, self.vocab, self.length + 1), np.zeros(1, np.int32), mask)
        return sample if self.told is None else sample._replace(teacher=LikeliestTokens(*self.told[index]))

    def fetch(self, indices: Any) -> Batch:
        return make_batch(self, indices, BatchOptions())


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=LR)


def from_values(values: Values) -> Initialize:
    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(values[tensor.name][box.slices()])

    return initialize


Steps = tuple[list[list[float]], list[tuple[str, Box, np.ndarray]]]


def steps(runtime: Runtime, data: RandomTokens, size: int) -> Steps:
    """Train and evaluate: numbers of each step, weights at the end."""
    stats = []
    for step in range(STEPS):
        loss, count, facts = runtime.evaluate_pairs(data.fetch, step * size, size)
        found = runtime.train_step(
            data.fetch, step * size, size, LR, clip_grad=1.0, loss_scale=4.0, step=step + 1, ahead=step + 1 < STEPS
        )
        assert found.tokens == count and abs(loss / count - found.loss) <= 1e-12 * abs(found.loss)
        np.testing.assert_allclose(list(facts.values()), list(found.facts.values()), rtol=1e-9, atol=1e-12)
        stats.append([found.loss, found.grad_norm, found.tokens, *(found.facts[name] for name in FACTS)])
    boxes = runtime.stage_model.boxes
    with runtime.whole_weights():
        return stats, [(name, boxes[name], p.detach().clone().numpy()) for name, p in runtime.sync.params.items()]


def run_rank(
    comm: Comm, made: Plan, spec: ModelSpec, initial: Values, other: ModelSpec, teacher: Values, d: Distillation,
    seed: int, logits_bytes: int,
) -> Steps:  # fmt: skip
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
    return steps(runtime, RandomTokens(seed, made.seq_length, spec.vocab_size), made.global_batch_size)


def score_rank(comm: Comm, made: Plan, other: ModelSpec, teacher: Values, data: RandomTokens, k: int) -> dict[int, Any]:
    """By sample, what the teacher says under a plan of its own: on the plan's first rank."""
    made = plan_for(made, comm.islands)
    compiled = CompiledPlan(made, other)
    comm.create_groups(compiled.forward_groups)
    if comm.rank not in made.ranks:
        return {}
    here = RankStage(made, other, comm.rank)
    kernels = default_kernels(other, here.share, here.stage.head, torch.float64, tp=here.unit.tp, tiled=here.tiled)
    takes: list[Likeliest] = []

    def ending(here: RankStage, built: StageModel) -> Likeliest:
        takes.append(Likeliest(here, built.module, kernels, comm.group(here.unit.ranks), 5, k, TEMPERATURE))
        return takes[0]

    model = ForwardModel(compiled, comm, torch.float64, from_values(teacher), kernels, ending)
    found: dict[int, Any] = {}
    for step in range(STEPS):
        first, size = step * made.global_batch_size, made.global_batch_size
        model.run(data.fetch, first, size)
        for rows, tokens, values in gather_rows(comm, made, first, size, k, takes[0] if takes else None):
            for n, row in enumerate(rows):
                parts = found.setdefault(row, [np.zeros((data.length, *v.shape[2:]), v.numpy().dtype) for v in values])
                for part, value in zip(parts, values, strict=True):
                    part[tokens] = value[n].numpy()
    return found


def learn_rank(
    comm: Comm, made: Plan, spec: ModelSpec, initial: Values, d: Distillation, data: RandomTokens, logits_bytes: int
) -> Steps:
    """Of a student whose data bring what the teacher said."""
    made = plan_for(made, comm.islands)
    compiled = CompiledPlan(made, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in made.ranks:
        return [], []
    options = RuntimeOptions(distillation=d, logits_bytes=logits_bytes)
    runtime = Runtime(compiled, comm, torch.float64, from_values(initial), sgd, options=options)
    return steps(runtime, data, made.global_batch_size)


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


def coarse(logps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n, V] of k + 1 outcomes: the tokens ``ids`` [n, k], and any other."""
    others = torch.ones_like(logps).scatter_(1, ids, 0.0).bool()
    rest = logps.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logps.gather(1, ids), rest], 1)


def reference(
    model: Any, teacher: Any, params: list[Any], data: RandomTokens, size: int, d: Distillation
) -> list[list[float]]:
    optimizer, wanted = torch.optim.SGD(params, lr=LR), []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = data.fetch(range(step * size, (step + 1) * size))
        assert batch.loss_mask is not None
        logits = model(input_ids=batch.tokens, use_cache=False).logits[batch.loss_mask]
        plain, mine = F.cross_entropy(logits, batch.labels[batch.loss_mask]), (logits / d.temperature).log_softmax(-1)
        if batch.teacher is not None:
            said = batch.teacher
            ids, logps, rest = (x[batch.loss_mask] for x in (said.ids, said.logps, said.rest))
            apart = divergence(coarse(mine, ids.long()), torch.cat([logps, rest[:, None]], 1).double(), d).mean()
        else:
            with torch.no_grad():
                other = teacher(input_ids=batch.tokens, use_cache=False).logits[batch.loss_mask]
            apart = divergence(mine, (other / d.temperature).log_softmax(-1), d).mean()
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
    compare(ranks, chosen, wanted, weights, d)


def compare(ranks: list[Steps], chosen: Plan, wanted: list[list[float]], weights: Any, d: Distillation) -> None:
    ranks = [r for r in ranks if r[0]]
    assert len(ranks) == len(chosen.ranks)
    for stats, values in ranks:
        np.testing.assert_allclose(stats, wanted, rtol=1e-9, atol=1e-11, err_msg=f"{d} {chosen}")
        for name, box, found in values:
            error = np.abs(found - weights[name].detach().numpy()[box.slices()]).max(initial=0.0)
            assert error <= 1e-9, (name, error, d, chosen)


UNEVEN = plan([
    pipe(1, 2, stage([0, 1], [0, 3], context=[{"ranks": [0, 1], "tokens": [11, 7], "heads": [2, 4]}])),
    pipe(2, 1, stage([2], [0, 2]), stage([3, 4], [2, 3], tp=2, tp_split=[2, 1])),
]) | {"seq_length": 18}  # fmt: skip
LARGER = LLAMA | {"num_hidden_layers": 6, "hidden_size": 48, "intermediate_size": 33, "head_dim": 8}


@pytest.mark.parametrize("loss", quick(LOSSES, ["forward_kl"]))
def test_a_larger_teacher_on_the_same_ranks(loss: str) -> None:
    """Beside two pipelines with unequal shares, one of context groups with unequal tokens, one with an uneven TP cut;
    whole, and as adapters with head and loss in chunks."""
    d = Distillation(loss, 0.7, 2.0, 0.3)
    check(LLAMA, LARGER, UNEVEN, None, d, 3, LOGITS_BYTES)
    check(LLAMA, LARGER, UNEVEN, Lora(2, 4.0), replace(d, weight=1.0, temperature=1.0), 4, 20_000)


@pytest.mark.slow
def test_a_student_that_divides_its_weights() -> None:
    """Unequally, beside a teacher that is whole on the same ranks."""
    divided = stage([0, 1], [0, 3], dp_split=[2, 1], weights={"shard": [3, 1]})
    check(LLAMA, LARGER, plan([pipe(3, 2, divided)]), None, Distillation("js", 0.7, 2.0, 0.3), 9, LOGITS_BYTES)


@pytest.mark.slow
def test_a_teacher_of_experts() -> None:
    """Whose student is dense: every rank of a TP group has its columns of all experts."""
    experts = MOE_FAMILIES["mixtral"] | {"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3}
    check(LLAMA, experts, UNEVEN, None, Distillation("forward_kl", 0.7, 2.0), 8, LOGITS_BYTES)


OWN = plan([
    pipe(2, 1, stage([0], [0, 4]), stage([1, 2, 3], [4, 6], tp=3, tp_split=[1, 1, 2])),
    pipe(1, 2, stage([4, 5], [0, 6], context=[{"ranks": [4, 5], "tokens": [5, 13], "heads": [2, 4]}])),
]) | {"seq_length": 18}  # fmt: skip


@pytest.mark.slow
def test_scores_of_a_teacher_under_another_plan() -> None:
    """What it says is transformers', position by position; the student's loss is over its likeliest tokens and one
    more outcome, any other."""
    (model, spec), (teacher, other) = make_hf(LLAMA, 5), make_hf(LARGER, 6)
    initial, known = ({n: t.detach().clone().numpy() for n, t in hf_to_logical(*each).items()}
                      for each in ((model, spec), (teacher, other)))  # fmt: skip
    first, plain, k = deepcopy(model.state_dict()), RandomTokens(7, 18, spec.vocab_size), 9
    chosen, own = plan_from_dict(UNEVEN, spec), plan_from_dict(OWN, other)
    assert chosen.global_batch_size == own.global_batch_size
    told = shared_pool().run(score_rank, own, other, known, plain, k)[own.ranks[0]]
    batch = plain.fetch(range(STEPS * own.global_batch_size))
    with torch.no_grad():
        logps = (teacher(input_ids=batch.tokens, use_cache=False).logits / TEMPERATURE).log_softmax(-1)
    wanted = logps.topk(k)
    ids, found, rest = (np.stack([told[i][part] for i in sorted(told)]) for part in range(3))
    assert len(ids) == len(batch.tokens) and (ids == wanted.indices.numpy()).all()
    np.testing.assert_allclose(found, wanted.values, rtol=1e-6)
    np.testing.assert_allclose(np.exp(rest), 1 - wanted.values.exp().sum(-1), rtol=1e-5)
    data = RandomTokens(7, 18, spec.vocab_size, told)
    for loss in LOSSES:
        d = Distillation(loss, 0.6, TEMPERATURE, 0.3)
        model.load_state_dict(first)
        numbers = reference(model, None, list(model.parameters()), data, chosen.global_batch_size, d)
        ranks = shared_pool().run(learn_rank, chosen, spec, initial, d, data, 20_000)
        compare(ranks, chosen, numbers, hf_to_logical(model, spec), d)


@pytest.mark.parametrize("seed", quick(range(6), (), [0]))
def test_random_plans(seed: int) -> None:
    """Teacher and student of unlike depth in one family; whole and as adapters."""
    rng = random.Random(seed + 500)
    config = random_model(rng)
    while config["model_type"] == "gpt2":
        config = random_model(rng)
    teacher = config | {"num_hidden_layers": 2 * config["num_hidden_layers"], "intermediate_size": 50}
    length, heads = rng.randint(12, 20), config["num_attention_heads"]
    made = random_plan(rng, config["num_hidden_layers"], heads, length, ranks=rng.choice([2, 3, 4, 5]))
    d = Distillation(rng.choice(LOSSES), rng.choice([0.3, 1.0]), rng.choice([1.0, 2.5]), 0.6)
    lora = Lora(2, 4.0) if seed % 2 else None
    check(config, teacher, made, lora, d, seed, rng.choice([LOGITS_BYTES, 10_000]))
