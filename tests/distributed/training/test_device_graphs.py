"""Layers as device graphs: the same bits as without, from far fewer launches, on a device that captures for real."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.model import initial_values
from hetero_megatron.ops.optimizer_ops import adamw_aten
from hetero_megatron.parallel.optimizer import AdamW
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.spec import Dropout, Lora, adapted
from hetero_megatron.spec.dropout import NO_DROPOUT
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support.parity import Case, RandomSamples
from tests.support.pool import Pool, shared_pool
from tests.support.selection import quick
from tests.support.vendors import with_attention

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 61}
MICRO_BATCHES, STEPS, EAGER = 4, 3, 1
Stages = list[dict[str, Any]]
ONE: Stages = [{"ranks": [0], "layers": [0, 4]}]
TWO: Stages = [{"ranks": [0], "layers": [0, 2]}, {"ranks": [1], "layers": [2, 4]}]
TP: Stages = [{"ranks": [0, 1], "layers": [0, 4], "tp": 2}]
MESHES: Stages = [{"ranks": [0, 1], "layers": [0, 2], "tp": 2}, {"ranks": [2, 3], "layers": [2, 4], "tp": 2}]
CHUNKS: Stages = [{"ranks": [r], "layers": [[r, r + 1], [r + 2, r + 3]]} for r in (0, 1)]

EMULATED_RANKS = 2
pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes


def case_of(
    model: dict[str, Any], pipelines: list[Stages], dtype: str = "fp32", rows: int = 1, dropout: Dropout = NO_DROPOUT,
    fp8: Fp8 | None = None, **plan: Any,
) -> Case:  # fmt: skip
    each = MICRO_BATCHES // len(pipelines)
    document = {
        "version": 1, "seq_length": 8, "global_batch_size": MICRO_BATCHES * rows, **plan,
        "pipelines": [{"micro_batch_size": rows, "num_micro_batches": each, "stages": s} for s in pipelines],
    }  # fmt: skip
    return Case(3, 2, model, document, dtype, masked=True, dropout=dropout, fp8=fp8)


def recomputed(stages: Stages, how: str) -> Stages:
    return [{**stage, "recompute": how} for stage in stages]


def trained(comm: Comm, case: Case, graphs_after: int | None, lora: Lora | None = None) -> dict[str, Any]:
    """Losses and norms of some steps, the weights after them, and what the last step launched and waited for."""
    spec = from_hf_config(case.model)
    spec = spec if lora is None else adapted(spec, lora)
    products = () if case.fp8 is None else (case.fp8.operator,)
    plan = with_attention(plan_for(plan_from_dict(case.plan, spec), comm.islands), comm.device, *products)
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return {}
    emu, stats = torch.emu, []  # type: ignore[attr-defined]
    gc.collect()  # of the cases before
    held = emu.memory_allocated()
    emu.reset_peak_memory_stats()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    runtime = Runtime(
        compiled, comm, dtype, lambda t, box: initial_values(t, box, spec, 0),
        lambda groups: AdamW(groups, adamw_aten, (0.9, 0.95), 1e-8),
        options=RuntimeOptions(graphs_after=graphs_after, dropout=case.dropout, seed=case.seed, fp8=case.fp8),
    )  # fmt: skip
    data, size = RandomSamples(case, spec.vocab_size), plan.global_batch_size
    for step in range(STEPS):
        before = emu.launches(), emu.host_waits()
        stats.append(runtime.train_step(data.fetch, step * size, size, 1e-2, clip_grad=1.0, loss_scale=8.0, step=step))
        launches, waits = (
            {name: n - old.get(name, 0) for name, n in now.items() if n > old.get(name, 0)}
            for now, old in zip((emu.launches(), emu.host_waits()), before, strict=True)
        )
    evaluated = runtime.evaluate(data.fetch, 0, size)
    return {
        "losses": [s.loss for s in stats], "norms": [s.grad_norm for s in stats], "evaluated": evaluated,
        "weights": {name: p.detach().cpu() for name, p in runtime.stage_model.module.named_parameters()},
        "launches": launches,
        "waits": waits, "peak": emu.max_memory_allocated() - held,
        "graphs": 0 if runtime.graphs is None else len(runtime.graphs),
    }  # fmt: skip


CASES = {
    "one rank": (case_of(LLAMA, [ONE]), [1]),
    # 1F1B: the first stage has two micro-batches in flight, each of which needs activations of its own.
    "pipeline": (case_of(LLAMA, [TWO]), [2, 1]),
    "chunks": (case_of(LLAMA, [CHUNKS], schedule="interleaved"), None),
    "all in flight": (case_of(LLAMA, [TWO], schedule="gpipe"), [4, 4]),
    "data parallel": (case_of(LLAMA, [ONE, [{"ranks": [1], "layers": [0, 4]}]]), [1, 1]),
    "tensor parallel": (case_of(LLAMA, [TP]), [1, 1]),
    "uneven tensor parallel": (case_of(LLAMA, [[{**TP[0], "tp_split": [3, 1]}]], dropout=Dropout(0.3, 0.2)), [1, 1]),
    "tensor parallel, recompute": (case_of(LLAMA, [recomputed(TP, "full")], "bf16", rows=2), [1, 1]),
    "recompute": (case_of(LLAMA, [recomputed(TWO, "full")]), [2, 1]),
    "recompute attention": (case_of(LLAMA, [recomputed(ONE, "selective")]), [1]),
    "recompute elementwise": (case_of(LLAMA, [recomputed(TWO, "elementwise")]), [2, 1]),
    "bf16": (case_of(LLAMA, [TWO], "bf16"), [2, 1]),
    "fp16": (case_of(LLAMA, [ONE], "fp16"), [1]),
    "biases and layer norms": (case_of(GPT2, [ONE]), [1]),
    "dropout": (case_of(GPT2, [TWO], dropout=Dropout(0.3, 0.2)), [2, 1]),
    "dropout, recompute": (case_of(LLAMA, [recomputed(TWO, "full")], dropout=Dropout(0.3, 0.2)), [2, 1]),
    "dropout, chunks": (case_of(LLAMA, [CHUNKS], schedule="interleaved", rows=2, dropout=Dropout(0.0, 0.4)), None),
    "adapters": (case_of(LLAMA, [TWO]), [2, 1]),
    "adapters, dropout, recompute": (case_of(LLAMA, [recomputed(ONE, "full")], dropout=Dropout(0.1, 0.0)), [1]),
    "DoRA on a base in 8 bits": (case_of(LLAMA, [TWO], "bf16"), [2, 1]),
    "tensorwise": (case_of(LLAMA, [ONE], "bf16", rows=2, fp8=Fp8("hybrid", "tensorwise")), [1]),
    "blockwise": (case_of(LLAMA, [TWO], "bf16", fp8=Fp8("e4m3", "blockwise")), [2, 1]),
    "all of it": (case_of(LLAMA, [TWO], dropout=Dropout(0.2, 0.2), fp8=Fp8("e4m3", "tensorwise")), [2, 1]),
}
ADAPTERS = {
    "adapters": Lora(2, 4.0, ("q_proj", "v_proj")),
    "adapters, dropout, recompute": Lora(2, 4.0, ("q_proj", "down_proj"), dropout=0.4),
    "DoRA on a base in 8 bits": Lora(2, 4.0, ("q_proj", "down_proj"), base_dtype="int8", dora=True),
    "all of it": Lora(2, 4.0, ("q_proj", "gate_proj"), dropout=0.1),
}


COSTLY = {
    "all of it", "tensorwise", "blockwise", "dropout", "dropout, recompute", "adapters, dropout, recompute", "chunks",
    "all in flight", "recompute attention", "biases and layer norms", "adapters",
    "uneven tensor parallel", "tensor parallel, recompute",
}  # fmt: skip
IN_CI = {"all of it", "blockwise", "dropout, recompute", "adapters, dropout, recompute", "chunks"}


@pytest.mark.parametrize("name", quick(CASES, set(CASES) - COSTLY, IN_CI))
def test_graphs_change_no_bit(name: str, pool: Pool) -> None:
    compare(name, pool)


@pytest.mark.slow
def test_graphs_on_streams_that_run_late() -> None:
    """While one graph is queued or runs, others are captured in its memory."""
    for name in ("chunks", "dropout, chunks", "pipeline", "tensor parallel") * 2:
        compare(name, shared_pool(("emulated:late=0.0003",) * EMULATED_RANKS))


@pytest.mark.slow
def test_graphs_of_meshes_on_a_device_with_bad_habits() -> None:
    """Two stages with tensor parallelism, whose graphs hold collectives."""
    habits = "lazy-loading,blocking-groups,slots=132,communicator-mib=8,freeing-waits"
    compare("two meshes", shared_pool((f"emulated:{habits}",) * 4))


def compare(name: str, pool: Pool) -> None:
    case, in_flight = {**CASES, "two meshes": (case_of(LLAMA, [MESHES]), [2, 2, 1, 1])}[name]
    lora = ADAPTERS.get(name)
    plain, graphed = (pool.run(trained, case, after, lora) for after in (None, EAGER))
    for rank, (one, other) in enumerate(zip(plain, graphed, strict=True)):
        if not one:
            continue
        for value in ("losses", "norms", "evaluated"):
            assert other[value] == one[value], value
        for weight, want in one["weights"].items():
            assert torch.equal(other["weights"][weight], want), weight
        layers = len({weight.split(".")[2] for weight in one["weights"] if ".layers." in weight})
        if in_flight is not None:
            assert other["graphs"] == 2 * layers * in_flight[rank]
        here = MICRO_BATCHES // (2 if name == "data parallel" else 1)
        assert other["launches"]["graph"] == 2 * layers * here
        assert sum(other["launches"].values()) < sum(one["launches"].values()) / 2
        assert sum(other["waits"].values()) <= 1, "and the host waits no more than without"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "stages", "fp8"),
    [("none", ONE, None), ("full", ONE, None), ("none", ONE, Fp8("e4m3", "tensorwise")), ("none", TP, None)],
)
def test_the_estimate_counts_what_graphs_take(how: str, stages: Stages, fp8: Fp8 | None, pool: Pool) -> None:
    """Without their part it would be a fifth too small."""
    model = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}  # tensors of many pages
    case = case_of(model, [recomputed(stages, how)], rows=2, seq_length=64, fp8=fp8)
    spec = from_hf_config(model)
    predicted = estimate_memory(plan_from_dict(case.plan, spec), spec, case.dtype, graphs=True, fp8=fp8)[0]
    peak = pool.run(trained, case, EAGER)[0]["peak"]
    assert 0.9 < peak / predicted.total < 1.1
