"""LoRA under any plan: values and gradients are those of peft in one process, fp64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, adapted, logical_tensors
from hetero_megatron.spec.lora import MLP_TARGETS, TARGETS, Sites
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support import nf4_reference
from tests.support.hf_reference import hf_loss_sum, hf_to_logical, make_hf
from tests.support.int8_reference import round_projections
from tests.support.moe_models import MOE_FAMILIES
from tests.support.parity import Case, RandomSamples
from tests.support.peft_reference import PeftDropout, adapter_values, keep_apart, peft_model, peft_values
from tests.support.pool import shared_pool
from tests.support.random_plans import divide_weights, random_model, random_plan
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

STEPS = 2
WEIGHT_DECAY = 0.1


def build(name: str) -> Any:
    if name == "sgd":
        return lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9)
    return lambda groups: torch.optim.AdamW(groups, lr=1e-2)


def run_rank(
    comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: dict[str, np.ndarray]
) -> tuple[list[list[float]], list[tuple[str, Box, np.ndarray]], int]:
    plan = plan_for(plan, comm.islands)
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return [], [], 0

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    options = RuntimeOptions(seed=case.seed)
    runtime = Runtime(compiled, comm, torch.float64, initialize, build(case.optimizer), options=options)
    data, size = RandomSamples(case, spec.vocab_size), plan.global_batch_size
    frozen, stats = {n: p for n, p in runtime.stage_model.module.named_parameters() if not p.requires_grad}, []
    with runtime.whole_weights():
        before = {n: p.clone() for n, p in frozen.items()}
    assert {n for n, p in frozen.items() if p.dtype in (torch.int8, torch.uint8)} == runtime.stage_model.scales.keys()
    for step in range(STEPS):
        ahead = step + 1 < STEPS
        found = runtime.train_step(data.fetch, step * size, size, 1e-2, WEIGHT_DECAY, 1.0, step=step + 1, ahead=ahead)
        stats.append([found.loss, found.grad_norm])
    assert all(p.grad is None for p in frozen.values())
    if runtime.divided is not None:
        assert runtime.divided.names <= frozen.keys(), "adapters stay whole"
        assert all(not part.memories[0].untyped_storage().nbytes() for part in runtime.divided.parts.values())
    with runtime.whole_weights():
        changed = sum(not torch.equal(p, before[n]) for n, p in frozen.items())
    weights = [(n, runtime.stage_model.boxes[n], p.detach().numpy().copy()) for n, p in runtime.sync.params.items()]
    return stats, weights, changed


def check(model_config: dict[str, Any], made: dict[str, Any], lora: Lora, case: Case) -> None:
    model, base = make_hf(model_config, case.seed)
    spec = adapted(base, lora)
    initial = {n: t.detach().clone().numpy() for n, t in hf_to_logical(model, base).items()}
    initial |= adapter_values(spec, case.seed)
    if lora.base_dtype == "nf4":
        nf4_reference.round_projections(model)
    if lora.base_dtype == "int8":
        round_projections(model, base.hf_model_type == "gpt_oss")
    assert initial.keys() == {t.name for t in logical_tensors(spec)}
    wrapped = peft_model(model, spec, initial)
    keep_apart(wrapped, spec)
    dropout = PeftDropout(wrapped, lora.dropout, case.seed)
    params = [p for p in wrapped.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if (p.dim() > 1) == wide], "weight_decay": WEIGHT_DECAY * wide}
              for wide in (True, False)]  # lengths of rows are one-dimensional: not decayed, as norms
    optimizer = build(case.optimizer)([group for group in groups if group["params"]])
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    plan = plan_from_dict(made, spec)
    data, wanted = RandomSamples(case, spec.vocab_size), []
    for step in range(STEPS):
        batch = data.fetch(range(step * plan.global_batch_size, (step + 1) * plan.global_batch_size))
        optimizer.zero_grad()
        dropout.begin(step + 1, step * plan.global_batch_size)
        total = hf_loss_sum(wrapped, batch.tokens, batch.labels, batch.positions, batch.documents, batch.loss_mask)
        loss = total / batch.num_loss_tokens()
        loss.backward()
        for param in params:  # of experts that no token chose; they are decayed
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        wanted.append([loss.item(), float(norm)])
    ranks = [r for r in shared_pool().run(run_rank, case, plan, spec, initial) if r[0]]
    trained = peft_values(wrapped, spec)
    assert len(ranks) == len(plan.ranks)
    for stats, weights, changed in ranks:
        np.testing.assert_allclose(stats, wanted, rtol=1e-10, err_msg=str(made))
        assert changed == 0
        for name, box, values in weights:
            error = np.abs(values - trained[name].numpy()[box.slices()]).max(initial=0.0)
            assert error <= 1e-9, (name, error, made)


@pytest.mark.parametrize("seed", quick(range(12), [0, 1], range(2, 6)))
def test_random_plans(seed: int) -> None:
    check_random(seed, None)


@pytest.mark.parametrize("seed", quick(range(200, 206), [200], [201, 203]))
def test_random_plans_of_dora(seed: int) -> None:
    """Rows of which several ranks have columns, too; the base as it is, or in 8 bits."""
    check_random(seed, "int8" if seed % 3 == 0 else None, dora=True)


@pytest.mark.parametrize("seed", quick(range(100, 106), [100], [101, 102]))
def test_random_plans_of_a_base_in_8_bits(seed: int) -> None:
    """The base is rounded as NumPy rounds it, wherever a plan cuts its channels."""
    check_random(seed, "int8")


@pytest.mark.parametrize("seed", quick(range(400, 406), [401], [400]))
def test_random_plans_of_a_base_in_4_bits(seed: int) -> None:
    """Of whole rows of blocks, wherever a plan cuts them: heads of 16, columns anywhere."""
    check_in_4_bits(seed, False)


@pytest.mark.parametrize("seed", quick(range(500, 510), [500], [501, 502]))
def test_random_plans_that_divide_a_base_in_4_bits(seed: int) -> None:
    check_in_4_bits(seed, True)


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", quick(["nf4", "int8"], ["nf4"], ["int8"]))
def test_dividing_a_base_in_few_bits_changes_no_bit(base_dtype: str) -> None:
    """Whenever it is gathered. Unequal shares, 0 among them, give the adapters other owners, and with these the norm
    another order of adding."""
    config = LLAMA | {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    model, base = make_hf(config, 3)
    spec = adapted(base, Lora(2, 4.0, base_dtype=base_dtype))
    initial = {n: t.detach().clone().numpy() for n, t in hf_to_logical(model, base).items()}
    initial |= adapter_values(spec, 3)

    def run(**more: Any) -> list[Any]:
        made = plan([pipe(3, 2, stage([0, 1, 2], [0, 3], dp_split=[1, 1, 1], **more))], seq_length=12)
        case = Case(3, 4, config, made, optimizer="sgd")
        return shared_pool().run(run_rank, case, plan_from_dict(made, spec), spec, initial)[:3]

    plain = run()
    for gather, shard, off in (("layer", [1, 1, 1], 0), ("step", [1, 1, 1], 0), ("micro-batch", [3, 0, 1], 1e-13)):
        divided = run(weights={"shard": shard, "gather": gather})
        for (stats, weights, changed), (plain_stats, plain_weights, _) in zip(divided, plain, strict=True):
            np.testing.assert_allclose(stats, plain_stats, rtol=off)
            assert changed == 0
            for (name, _, values), (_, _, plain_values) in zip(weights, plain_weights, strict=True):
                np.testing.assert_allclose(values, plain_values, rtol=0, atol=off, err_msg=f"{name}, {gather}")


def check_in_4_bits(seed: int, divided: bool) -> None:
    rng = random.Random(seed)
    config = LLAMA | {
        "hidden_size": 128, "intermediate_size": 64 * rng.randint(1, 3), "num_attention_heads": 8,
        "num_key_value_heads": rng.choice([2, 8]),
    }  # fmt: skip
    made = random_plan(rng, config["num_hidden_layers"], 8, rng.randint(8, 16), ranks=rng.choice([2, 3, 4]))
    made = dividing_plan(rng, config["num_hidden_layers"], 8, 12) if divided else made
    lora = Lora(rng.choice([1, 3]), 4.0, tuple(rng.sample(TARGETS, 4)), base_dtype="nf4")
    check(config, made, lora, Case(seed, 4, config, made, optimizer="sgd", packed=rng.random() < 0.5))


@pytest.mark.parametrize("seed", quick(range(300, 308), [300], [301, 303]))
def test_random_plans_that_divide_the_base(seed: int) -> None:
    """It is gathered and never reduced; every third one in 8 bits."""
    check_random(seed, "int8" if seed % 3 == 0 else None, divided=True)


def dividing_plan(rng: random.Random, layers: int, heads: int, length: int) -> dict[str, Any]:
    """One in which some stage divides its weights."""
    while True:
        made = random_plan(rng, layers, heads, length, ranks=rng.choice([2, 3, 4]), most_pipelines=2)
        divide_weights(rng, made, heads)
        if any("weights" in stage for pipeline in made["pipelines"] for stage in pipeline["stages"]):
            return made


def check_random(seed: int, base_dtype: str | None, dora: bool = False, divided: bool = False) -> None:
    rng = random.Random(seed + 7000)
    config = random_model(rng)
    while config["model_type"] == "gpt2":
        config = random_model(rng)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    length = rng.randint(8, 16)
    made = random_plan(rng, layers, heads, length, ranks=rng.choice([1, 2, 3, 4]))
    made = dividing_plan(rng, layers, heads, length) if divided else made
    targets = TARGETS if rng.random() < 0.5 else tuple(rng.sample(TARGETS, rng.randint(1, 4)))
    dropout = rng.choice([0.0, 0.05, 0.5]) * (not dora)
    lora = Lora(rng.choice([1, 3, 8]), rng.choice([4.0, 16.0]), targets, rng.random() < 0.3, dropout, base_dtype, dora)
    case = Case(seed, 4, config, made, optimizer=rng.choice(["adamw", "sgd"]), packed=rng.random() < 0.5)
    check(config, made, lora, case)


@pytest.mark.parametrize("dora", [False, True])
def test_latent_attention(dora: bool) -> None:
    """Adapters of what every rank computes whole, and of what is cut by heads."""
    config = MOE_FAMILIES["deepseek_v2"] | {"first_k_dense_replace": 3}
    made = plan([pipe(2, 2, stage([0, 1, 2], [0, 2], tp=3, tp_split=[2, 1, 1]), stage([3], [2, 3]))])
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    lora = Lora(3, 6.0, targets, dropout=0.0 if dora else 0.3, dora=dora)
    check(config, made, lora, Case(2, 4, config, made, packed=True))


@pytest.mark.parametrize("case", quick([0, 1, 3], [1], []))
def test_experts_in_8_bits(case: int) -> None:
    check_experts(case, "int8")


@pytest.mark.parametrize("case", quick(range(5), [1], [0, 2, 3]))
def test_experts(case: int) -> None:
    check_experts(case, None)


@pytest.mark.parametrize("case", quick(range(5), [0], [1, 2, 4]))
def test_dora_of_experts(case: int) -> None:
    """Each row of every expert has a length of its own, also where ranks share its columns; case 3 in 8 bits."""
    check_experts(case, "int8" if case == 3 else None, dora=True)


def check_experts(case: int, base_dtype: str | None, dora: bool = False) -> None:
    """Unequal expert parallelism, replicated experts, experts cut by columns, pipelines; attention alone; gate and up
    alone; a layer of experts whose input has no gradient."""
    dense = {"ranks": [0, 1], "experts": [[0, 1], [1, 5]]}
    thirds = [{"ranks": [[0, 2], 1], "experts": [[0, 2], [2, 5]], "split": [[2, 1], [1]]}]
    twice = [{"ranks": [2, 0, 1], "experts": [[0, 3], [], [2, 5]]}]
    family, layers, stages, targets = [
        ("qwen3_moe", 2, [stage([0, 1, 2], [0, 2], tp=3, tp_split=[2, 1, 1], experts=thirds)], TARGETS),
        ("gpt_oss", 2, [stage([0, 1, 2], [0, 1], dp_split=[1, 1, 1], experts=twice), stage([3], [1, 2])], MLP_TARGETS),
        ("qwen2_moe", 2, [stage([0, 1], [0, 1], tp=2, experts=[dense]), stage([2], [1, 2])], ("q_proj", "o_proj")),
        ("mixtral", 2, [stage([0, 1], [0, 1], tp=2), stage([2], [1, 2])], ("gate_proj", "up_proj", "v_proj")),
        ("deepseek_v3", 3, [stage([0, 1], [0, 2], tp=2, recompute="full"), stage([2], [2, 3])], ("down_proj",)),
    ][case]
    config = MOE_FAMILIES[family]
    assert config["num_hidden_layers"] == layers
    made = plan([pipe(3, 2, *stages)])
    lora = Lora(2, 5.0, targets, rslora=case == 1, base_dtype=base_dtype, dora=dora)
    check(config, made, lora, Case(case, 4, config, made, optimizer="sgd" if case == 2 else "adamw", packed=case == 1))


@pytest.mark.parametrize("recompute", quick(["none", "full"], ["full"]))
def test_dropout_belongs_to_the_tokens(recompute: str) -> None:
    """Of context groups with unequal tokens, of replicas, of columns that ranks share, and where layers run again."""
    groups = [{"ranks": [0, 1], "tokens": [7, 3], "heads": [2, 4]}]
    made = plan([
        pipe(1, 3, stage([0, 1], [0, 3], context=groups, recompute=recompute)),
        pipe(1, 1, stage([2, 3], [0, 3], tp=2, tp_split=[2, 1], recompute=recompute)),
    ])
    check(LLAMA, made, Lora(4, 8.0, dropout=0.4), Case(3, 4, LLAMA, made))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_stages_without_a_layer_have_nothing_to_train(schedule: str) -> None:
    """The embedding alone on the first stage, the head alone on the last; they have no gradient, and no bucket."""
    made = plan([pipe(1, 4, stage([0], []), stage([1, 2], [0, 3], tp=2, tp_split=[2, 1]), stage([3], []))])
    if schedule == "interleaved":
        made = plan([pipe(1, 4, stage([0], [[0, 0], [1, 2]]), stage([1, 2], [[0, 1], [2, 3]], tp=2))])
    made |= {"schedule": schedule}
    check(LLAMA, made, Lora(4, 8.0), Case(1, 4, LLAMA, made))


@pytest.mark.parametrize("case", ["stages", "zero-bubble", "divided", "dora", "recompute"])
def test_layers_with_adapters_of_their_own(case: str) -> None:
    """Ranks and alphas that differ, layers with none below, between and above, stages that train nothing, whose weights
    may be divided."""
    sites = (Sites((1,), ("q_proj", "down_proj"), 2, 3.0), Sites((2,), ("v_proj",), 5, 4.0))
    stages = [stage([0], [0, 1]), stage([1, 2], [1, 2], tp=2, tp_split=[2, 1]), stage([3], [2, 3])]
    if case == "stages":  # the last ones have none
        sites = (Sites((0,), ("o_proj", "up_proj"), 3, 3.0), Sites((0,), ("k_proj",), 1, 9.0))
    elif case == "divided":
        stages = [stage([0, 1], [0, 1], dp_split=[1, 1]), stage([2, 3], [1, 3], tp=2)]
        stages[0]["weights"] = {"shard": [2, 1], "gather": "layer"}
    elif case == "recompute":
        stages = [stage([0, 1], [0, 2], tp=2, recompute="full"), stage([2], [2, 3], recompute="selective")]
    made = plan([pipe(2, 3, *stages)], schedule=case if case == "zero-bubble" else "1f1b")
    lora = Lora(4, 8.0, sites=sites, targets=(), rslora=case == "stages", dora=case == "dora")
    check(LLAMA, made, lora, Case(4, 4, LLAMA, made))
