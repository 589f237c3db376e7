"""Training with other providers gives the same numbers: Triton's interpreter, mixed stages, torch.compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.ops import KernelPlan, Registry, Signature, resolve
from hetero_megatron.ops.stage import stage_signatures
from hetero_megatron.plans import Plan, load_plan, locate, plan_from_dict, stage_at, unit_at
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.context_plan import stage_contexts
from hetero_megatron.plans.kernels import with_kernels
from hetero_megatron.plans.shares import rank_shares
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.train import optimizer_factory
from tests.support.moe_models import MOE_FAMILIES
from tests.support.pool import shared_pool
from tests.support.programs import run_ranks
from tests.support.selection import quick

MODEL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 101, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 101,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0}  # fmt: skip
LENGTH, STEPS = 64, 2


def make_plan(spec: ModelSpec, *stages: dict[str, Any]) -> Plan:
    data = {"seq_length": LENGTH, "global_batch_size": 2,
            "pipelines": [{"micro_batch_size": 1, "num_micro_batches": 2, "stages": list(stages)}]}  # fmt: skip
    return plan_from_dict(data, spec)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 101, (2, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)


def kernels_of(
    plan: Plan, spec: ModelSpec, rank: int, compiled: bool = False, registry: Registry | None = None
) -> KernelPlan:
    place = locate(plan, rank)
    stage, unit = stage_at(plan, place), unit_at(plan, place)
    share = rank_shares(spec, stage)[rank]
    requests = dict(stage.kernels)
    base = Signature("", "cpu", torch.float32, "cpu", compiled=compiled)
    tiled = bool(stage_contexts(spec, stage, plan.seq_length))
    signatures = stage_signatures(base, spec, share, stage.head, unit.tp, requests, tiled=tiled)
    return resolve(registry or load_plugins().registry, signatures, requests)


def train(
    comm: Comm, plan: Plan, spec: ModelSpec, backend: str | None = None, registry: Registry | None = None
) -> tuple[list[float], Any, str]:
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return [], {}, ""

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, spec, 7)

    kernels = kernels_of(plan, spec, comm.rank, backend is not None, registry)
    factory = optimizer_factory(OptimizerConfig(), kernel=kernels.adamw)
    runtime = Runtime(
        compiled, comm, torch.float32, initialize, factory, kernels, RuntimeOptions(compile_backend=backend)
    )
    data = batch()

    def fetch(indices: Any) -> Batch:
        rows = [i % 2 for i in indices]
        return Batch(data.tokens[rows], data.labels[rows], data.positions[rows])

    losses = [runtime.train_step(fetch, 0, 2, 1e-3, 0.1, 1.0).loss for _ in range(STEPS)]
    assert runtime.stage_model.kernels is kernels
    weights = {n: (runtime.stage_model.boxes[n], p.detach().numpy().copy()) for n, p in runtime.sync.params.items()}
    return losses, weights, kernels.summary()


def compare(plan: Plan, other: Plan, spec: ModelSpec, backend: str | None = None) -> list[str]:
    """Losses to 1e-5 and weights to 1e-4 of their scale after two steps of AdamW in fp32 (lr 1e-3)."""
    wants = shared_pool().run(train, plan, spec)
    gots = shared_pool().run(train, other, spec, backend)
    whole = {}
    for _, weights, _ in wants:
        whole |= {(n, str(b)): a for n, (b, a) in weights.items()}
    for losses, weights, _ in gots[: len(other.ranks)]:
        np.testing.assert_allclose(losses, wants[plan.ranks[0]][0], rtol=1e-5, atol=0)
        assert losses[-1] < losses[0]
        for name, (box, array) in weights.items():
            np.testing.assert_allclose(array, whole[name, str(box)], rtol=0, atol=1e-4, err_msg=name)
    return [summary for _, _, summary in gots[: len(other.ranks)]]


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODEL, GPT2], ids=["llama", "gpt2"])
def test_training_with_interpreted_kernels_equals_the_references(model: dict[str, Any]) -> None:
    spec = from_hf_config(model)
    plan = make_plan(spec, {"ranks": 0, "layers": [0, 2]})
    (summary,) = compare(with_kernels(plan, ["reference"]), with_kernels(plan, ["triton"]), spec)
    assert "triton: " in summary and "reference" not in summary


@pytest.mark.slow
def test_unlike_kernel_plans_per_stage_equal_one_provider() -> None:
    spec = from_hf_config(MODEL)
    stages = [{"ranks": [0, 1], "layers": [0, 1], "tp": 2, "tp_split": [3, 1]}, {"ranks": 2, "layers": [1, 2]}]
    plan = make_plan(spec, *stages)
    mixed = with_kernels(plan, ["0.0:reference", "0.0:rms_norm=triton", "0.1:triton", "0.1:swiglu=aten"])
    one, other, last = compare(plan, mixed, spec)
    assert one == other and "triton: rms_norm" in one and "reference: " in one
    assert "aten: " in last and "swiglu" in last.split("triton: ")[0]


@pytest.mark.parametrize("recompute", quick(["none", "selective", "full"], [], ["selective"]))
def test_compiled_layers_equal_uncompiled_ones(recompute: str) -> None:
    spec = from_hf_config(MODEL)
    plan = make_plan(spec, {"ranks": [0, 1], "layers": [0, 2], "tp": 2, "recompute": recompute})
    compare(plan, with_kernels(plan, ["rms_norm=triton"]), spec, backend="aot_eager")


@pytest.mark.parametrize("recompute", quick(["none", "full"], [], ["full"]))
def test_a_compiled_mixture_of_experts_equals_the_uncompiled(recompute: str) -> None:
    """With a shared expert, and experts divided unequally."""
    spec = from_hf_config(MOE_FAMILIES["qwen2_moe"] | {"vocab_size": 101})
    experts = [{"ranks": [1, 0], "experts": [[0, 4], [4, 5]]}]
    stage = {"ranks": [0, 1], "layers": [0, 2], "tp": 2, "recompute": recompute, "experts": experts}
    plan = make_plan(spec, stage)
    compare(plan, plan, spec, backend="aot_eager")


@pytest.mark.slow  # a C++ compiler runs for every graph
@pytest.mark.timeout(600)
def test_the_default_compiler_takes_the_kernels_of_a_plugin() -> None:
    """What ``--compile`` does without more words, with operators whose strides the fakes have promised."""
    spec = from_hf_config(MODEL)
    plan = make_plan(spec, {"ranks": 0, "layers": [0, 2]})
    compare(plan, with_kernels(plan, ["rms_norm=triton", "rope=triton", "swiglu=triton"]), spec, backend="inductor")


def test_head_and_loss_in_one_equal_the_unfused() -> None:
    """By request only; the logits never exist. Not for a vocabulary that is cut."""
    spec = from_hf_config(MODEL)
    plan = make_plan(spec, {"ranks": 0, "layers": [0, 1]}, {"ranks": 1, "layers": [1, 2]})
    _, last = compare(plan, with_kernels(plan, ["linear_cross_entropy=aten"]), spec)
    assert "linear_cross_entropy" in last and "cross_entropy" not in last.replace("linear_cross_entropy", "")
    cut = make_plan(spec, {"ranks": [0, 1], "layers": [0, 2], "tp": 2})
    with pytest.raises(UserError, match="head and loss in one"):
        kernels_of(with_kernels(cut, ["linear_cross_entropy=aten"]), spec, 0)


def test_kernels_of_a_plan_file_and_the_flag(tmp_path: Path) -> None:
    spec = from_hf_config(MODEL)
    text = (
        "seq_length: 64\nglobal_batch_size: 2\npipelines:\n  - micro_batch_size: 1\n    num_micro_batches: 2\n"
        "    stages:\n      - {ranks: 0, layers: [0, 1], kernels: {rms_norm: reference}}\n"
        "      - {ranks: 1, layers: [1, 2]}\n"
    )
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    plan = load_plan(path, spec)
    flagged = with_kernels(plan, ["rms_norm=aten", "0.1:rope=reference"])
    assert [dict(s.kernels) for s in flagged.pipelines[0].stages] == [
        {"rms_norm": "reference"}, {"rms_norm": "aten", "rope": "reference"},
    ]  # fmt: skip
    assert flagged.fingerprint() != plan.fingerprint()
    for word, says in {
        "rms_nrom=aten": "did you mean rms_norm", "1.0:aten": "no stage 1.0", "0.7:aten": "no stage 0.7",
        "=aten": "not understood", "0.0:rms_norm=aten": "the plan says reference", "": "not understood",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=says):
            with_kernels(plan, [word])


def test_a_run_prints_its_kernels_and_refuses_what_it_cannot_have() -> None:
    flags = [
        "--model", "tiny", "--mock-data", "--seq-length", "32",
        "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "1", "--lr", "1e-3", "--kernels",
    ]  # fmt: skip
    good, _ = run_ranks(1, [*flags, "rms_norm=reference", "--log-kernel-plan"])
    assert "kernels of pipeline 0 stage 0 (" in good and "reference: rms_norm" in good
    rows = [line.split() for line in good.splitlines()]
    assert ["rms_norm", "reference", "requested"] in rows and ["swiglu", "aten"] in rows
    assert ["not", "triton:"] in [row[:2] for row in rows], "with what was passed over and why"
    _, bad = run_ranks(1, [*flags, "rope=tritn"], code=2)
    assert "no such provider of rope (did you mean triton?)" in bad
