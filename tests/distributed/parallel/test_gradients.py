"""Gradients are added up where they are sent from, and new weights arrive where they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.model import initial_values
from hetero_megatron.ops.optimizer_ops import adamw_aten
from hetero_megatron.parallel.optimizer import SGD, AdamW
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support.pool import shared_pool

MODEL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
SPEC = from_hf_config(MODEL)


def replicas(tps: list[int], **model: Any) -> Plan:
    pipelines, first = [], 0
    for tp in tps:
        stage = {"ranks": list(range(first, first + tp)), "layers": [0, 2], "tp": tp}
        pipelines.append({"micro_batch_size": 1, "num_micro_batches": 2, "stages": [stage]})
        first += tp
    data = {"seq_length": 8, "global_batch_size": 2 * len(tps), "pipelines": pipelines}
    return plan_from_dict(data, from_hf_config(MODEL | model))


def look(comm: Comm, plan: Plan, model: dict[str, Any], logits_bytes: int = 1 << 30) -> dict[str, Any]:
    """Two steps on one rank: what was packed, and whose gradients came through autograd."""
    spec = from_hf_config(MODEL | model)
    compiled = CompiledPlan(plan, spec, bucket_bytes=8 << 10)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return {}
    runtime = Runtime(
        compiled, comm, torch.bfloat16, lambda t, box: initial_values(t, box, spec, 0),
        lambda groups: AdamW(groups, adamw_aten, (0.9, 0.95), 1e-8),
        options=RuntimeOptions(logits_bytes=logits_bytes),
    )  # fmt: skip
    sync, seen = runtime.sync, set()
    for name, param in sync.params.items():
        param.register_hook(lambda grad, name=name: seen.update([name] if grad is not None else []))
    tokens = torch.arange(64).view(8, 8) % 61

    def fetch(indices: Any) -> Batch:
        return Batch(tokens[list(indices)], tokens[list(indices)], torch.arange(8).expand(len(indices), 8))

    for _ in range(2):
        runtime.train_step(fetch, 0, plan.global_batch_size, 1e-3)
        assert all(p.grad is None for p in sync.params.values())
    for e in sync.exchanges:
        flat = sync.flat.get(e.bucket.index)
        assert (flat is not None) == e.bucket.dense == (e.hops[0].runs is not None)
        assert flat is None or all(sync.params[n].data_ptr() == v.data_ptr() for n, v in flat.views.items())
    return {
        "dense": [e.bucket.dense for e in sync.exchanges], "packed": [e.hops[0].packed for e in sync.exchanges],
        "seen": seen, "all": set(sync.params),
    }  # fmt: skip


def test_equal_replicas_pack_nothing() -> None:
    for count in (2, 3):
        for found in shared_pool().run(look, replicas([1] * count), {})[:count]:
            assert len(found["dense"]) > 2 and all(found["dense"]) and set(found["packed"]) == {(0, 0, 0)}


def test_unlike_replicas_pack() -> None:
    for found in shared_pool().run(look, replicas([2, 1]), {})[:3]:
        assert not any(found["dense"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("logits_bytes", [1 << 30, 1000])
def test_weights_of_products_do_not_pass_through_autograd(tied: bool, logits_bytes: int) -> None:
    """A tied head's weight does: its gradient has two parts."""
    plan, model = replicas([1], tie_word_embeddings=tied), {"tie_word_embeddings": tied}
    found = shared_pool().run(look, plan, model, logits_bytes)[0]
    assert found["seen"] == {n for n in found["all"] if "norm" in n or "embed" in n}
    assert ("lm_head.weight" in found["all"]) != tied


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum"])
def test_optimizers_are_torchs(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (7,), (2, 0), (5,)]
    mine, theirs = ([torch.zeros(s, dtype=torch.float64) for s in shapes] for _ in range(2))
    for a, b in zip(mine, theirs, strict=True):
        a.copy_(torch.randn(a.shape, generator=generator, dtype=torch.float64))
        b.copy_(a)
    momentum = 0.9 if kind == "momentum" else 0.0
    optimizer: Any
    if kind == "adamw":
        want: torch.optim.Optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer = AdamW([{"params": mine}], adamw_aten, (0.9, 0.95), 1e-8)
    else:
        want = torch.optim.SGD(theirs, lr=1e-2, momentum=momentum, weight_decay=0.1)
        optimizer = SGD([{"params": mine}], momentum)
    optimizer.param_groups[0].update(lr=1e-2, weight_decay=0.1)
    for _ in range(4):
        for a, b in zip(mine[:3], theirs[:3], strict=True):  # the last one has no gradient
            a.grad = torch.randn(a.shape, generator=generator, dtype=torch.float64)
            b.grad = 0.3 * a.grad
        optimizer.step(0.3)
        want.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    keys = {key for p in mine for key in optimizer.state.get(p, {})}
    assert keys == {key for state in want.state.values() for key, value in state.items() if value is not None}


def sums_in_bf16(comm: Comm, plan: Plan) -> tuple[dict[str, Any], list[Any]]:
    """On one rank: (boxes and values of gradients that were made up, names, boxes and sums of what it owns)."""
    compiled = CompiledPlan(plan, SPEC, bucket_bytes=8 << 10)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return {}, []
    runtime = Runtime(
        compiled, comm, torch.float64, lambda t, box: initial_values(t, box, SPEC, 0).double(),
        lambda groups: AdamW(groups, adamw_aten, (0.9, 0.95), 1e-8), options=RuntimeOptions(reduce_in_bf16=True),
    )  # fmt: skip
    sync, boxes = runtime.sync, runtime.stage_model.boxes
    generator = torch.Generator().manual_seed(comm.rank)
    given = {}
    for name, param in sync.params.items():
        values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        sync.sums.sum(name).copy_(values)
        given[name] = (boxes[name], values.numpy())
    owned = sync.finish()
    return given, [
        (piece.name, piece.box, tensor.clone().numpy())
        for exchange, tensors in zip(sync.exchanges, owned, strict=True)
        for piece, tensor in zip(exchange.pieces, tensors, strict=True)
    ]


@pytest.mark.parametrize("tps", [[1, 1], [1, 1, 1], [2, 1], [2, 3, 1]])
def test_gradients_travel_in_bf16(tps: list[int]) -> None:
    """A rank's own part as it is, those of others rounded once, added up in the dtype of the sums."""
    ranks = shared_pool().run(sums_in_bf16, replicas(tps))[: sum(tps)]
    pieces = 0
    for owner, (_, owned) in enumerate(ranks):
        for name, box, got in owned:
            want, pieces = np.zeros(box.shape), pieces + 1
            for rank, (given, _) in enumerate(ranks):
                part = given[name][0].intersect(box) if name in given else None
                if part is None:
                    continue
                values = torch.from_numpy(given[name][1][part.slices(given[name][0])])
                sent = values if rank == owner else values.bfloat16().double()
                want[part.slices(box)] += sent.numpy()
            np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-15, err_msg=name)
    assert pieces > 10
