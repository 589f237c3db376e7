"""Muon against torch.optim.Muon, the owners of matrices, refusals, and memory against dry runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.cli.configure import configure
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, Layout
from hetero_megatron.parallel.muon import newton_schulz
from hetero_megatron.plans import dump_yaml, plan_from_dict
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.matrices import is_matrix, matrix_owners, newton_schulz_flops
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.plans.memory.replicas import copies_of
from hetero_megatron.spec import load_model, logical_tensors
from hetero_megatron.spec.muon import MuonRates
from tests.support.muon_reference import TORCH, in_full_precision, our_muon
from tests.support.small_plans import pipe, plan, stage

SHAPES = [(5, 7), (7, 5), (6, 6), (1, 9), (9, 1)]
FLAGS = ["--model", "tiny", "--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--train-iters", "1"]
MUON = [*FLAGS, "--lr", "1e-3", "--optimizer", "muon"]
UNLIKE = plan([
    pipe(2, 3, stage([4, 1], [0, 4], tp=2, tp_split=[3, 1]), stage([2], [4, 6])),
    pipe(2, 1, stage([3, 0], [0, 6], tp=1, dp_split=[1, 1], optimizer={"share": 3})),
], seq_length=16)  # fmt: skip


def test_a_hundred_steps_are_those_of_torch() -> None:
    """All of its options, of matrices of any shape; and its own bf16 where weights have 16 bits."""
    for rates, options in (
        (TORCH, {"adjust_lr_fn": "match_rms_adamw"}),
        (replace(TORCH, nesterov=False, momentum=0.8, steps=7), {"adjust_lr_fn": "match_rms_adamw", "nesterov": False,
                                                                 "momentum": 0.8, "ns_steps": 7}),
        (replace(TORCH, scale_mode="shape_scaling", extra_scale=1.0), {"adjust_lr_fn": "original"}),
    ):  # fmt: skip
        with in_full_precision():
            compare(torch.float64, torch.float64, rates, options, 100, 1e-9)
    compare(torch.float32, torch.bfloat16, TORCH, {"adjust_lr_fn": "match_rms_adamw"}, 3, 1e-6)


def compare(
    dtype: torch.dtype, weights: torch.dtype, rates: MuonRates, options: dict[str, Any], steps: int, bound: float
) -> None:
    torch.manual_seed(3)
    ours = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    theirs = [torch.nn.Parameter(p.clone()) for p in ours]
    mine = our_muon(rates)([{"params": ours, "decay": True, "matrices": weights}])
    mine.param_groups[0] |= {"lr": 0.02, "weight_decay": 0.1}
    other = torch.optim.Muon(theirs, 0.02, 0.1, **options)
    for _ in range(steps):
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.randn_like(p)
            p.grad = q.grad.clone()
        mine.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q.detach()).abs().max() <= bound


def test_newton_schulz_of_zeros_and_of_what_is_not_finite() -> None:
    for kind in ("simple", "quintic"):
        rates = MuonRates(coefficients=kind)
        assert torch.equal(newton_schulz(torch.zeros(3, 5), rates), torch.zeros(3, 5))
        for bad in (float("nan"), float("inf")):
            matrix = torch.randn(3, 5)
            matrix[1, 2] = bad
            assert newton_schulz(matrix, rates).isnan().any()
        torch.manual_seed(1)
        values = torch.linalg.svdvals(newton_schulz(torch.randn(20, 50, dtype=torch.float64), rates))
        assert values.min() > 0.6 and values.max() < 1.3


def test_matrices_go_whole_to_owners_by_their_speed() -> None:
    """LPT: every matrix has one owner among its holders, and none is done much later than others."""
    spec = load_model("tiny")
    tensors = [t for t in logical_tensors(spec) if is_matrix(t)]
    assert {t.name.split(".")[-2] for t in tensors} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    for weights in ({}, {0: 3.0}, {0: 0.0, 1: 2.0, 2: 1.0}):
        holders = {t.name: Layout(t.shape, dict.fromkeys(range(3), (Box.whole(t.shape),))) for t in tensors}
        owners = matrix_owners(tensors, holders, weights)
        assert all(sorted(b for _, b in owners[t.name].items()) == [Box.whole(t.shape)] for t in tensors)
        costs = {t.name: newton_schulz_flops(*t.shape) for t in tensors}
        load = {r: sum(costs[n] for n, layout in owners.items() if layout.of(r)) for r in range(3)}
        assert weights.get(0) != 0.0 or load[0] == 0
        ends = [load[r] / weights.get(r, 1.0) for r in range(3) if weights.get(r, 1.0)]
        slowest = min(w for r in range(3) if (w := weights.get(r, 1.0)))
        assert max(ends) - min(ends) <= 2 * max(costs.values()) / slowest


@pytest.mark.slow
def test_memory_is_that_of_a_dry_run_to_the_byte(tmp_path: Path) -> None:
    """With TP, owners of unlike shares and replicas of unlike degrees; less than Adam's, half of it of matrices."""
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan_from_dict(UNLIKE, load_model("tiny"))))
    for dtype in ("--fp32", "--bf16"):
        flags = [] if dtype == "--fp32" else [dtype]
        run = configure(
            ["--plan", str(path), "--model", "tiny", "--dry-run", "--optimizer", "muon", *flags], {"WORLD_SIZE": "5"}
        )
        found = estimate_memory(run.plan, run.spec, run.dtype, 2, run.compiled.buckets)
        assert found == estimate_memory(run.plan, run.spec, run.dtype, 2, muon=True)
        for rank in (0, 1) if flags else (1,):
            dry = run_rank(run, rank)
            assert (dry.parameters, dry.optimizer) == (found[rank].weights, found[rank].optimizer)
            assert 0.95 * dry.peak <= found[rank].total <= 1.2 * dry.peak
        adam = estimate_memory(run.plan, run.spec, run.dtype)
        assert sum(m.optimizer for m in found.values()) < 0.8 * sum(m.optimizer for m in adam.values())
        nodes = {r: str(r) for r in run.plan.ranks}
        copies = copies_of(run.plan, run.compiled.buckets, run.dtype, 2, nodes)
        elements = sum(t.size * (2 if is_matrix(t) else 3) for t in logical_tensors(run.spec))
        assert sum(copies.sizes.values()) == 4 * elements


def test_buckets_of_matrices_are_alike_on_every_rank_and_cover_all() -> None:
    spec = load_model("tiny")
    made = plan_from_dict(UNLIKE, spec)
    buckets = make_buckets(made, spec, muon=True)
    names = [name for bucket in buckets for name in bucket.names]
    assert sorted(names) == sorted(t.name for t in logical_tensors(spec))
    assert all(bucket.matrices == is_matrix(t) for bucket in buckets for t in logical_tensors(spec)
               if t.name in bucket.names)  # fmt: skip
    assert not any(bucket.dense for bucket in buckets if bucket.matrices)
    assert not any(bucket.matrices for bucket in make_buckets(made, spec))


def test_what_muon_is_not_combined_with_is_refused(tmp_path: Path) -> None:
    def refusal(*flags: str, world: int = 1) -> str:
        with pytest.raises(UserError) as error:
            configure([*MUON, *flags], {"WORLD_SIZE": str(world)})
        return str(error.value)

    assert "adapters" in refusal("--lora-rank", "4")
    assert "quintic coefficients are for 5 steps" in refusal("--muon-num-ns-steps", "4")
    assert "whole matrix" in refusal("--muon-tp-mode", "blockwise")
    assert "AdamW" in refusal("--muon-scalar-optimizer", "lion")
    assert "Q, K and V" in refusal("--muon-no-split-qkv")
    assert "--muon-momentum" in refusal("--muon-momentum", "1")
    with pytest.raises(UserError, match="--optimizer muon"):
        configure([*FLAGS, "--lr", "1e-3", "--muon-momentum", "0.9"], {"WORLD_SIZE": "1"})
    for key, said in (
        ({"weights": {"gather": "layer"}}, "divides its weights"), ({"optimizer": {"offload": True}}, "offload")
    ):  # fmt: skip
        path = tmp_path / "plan.yaml"
        spelled = plan([pipe(2, 1, stage([0, 1], [0, 6], dp_split=[1, 1], **key))], seq_length=16)
        path.write_text(dump_yaml(plan_from_dict(spelled, load_model("tiny"))))
        with pytest.raises(UserError, match=said):
            configure(["--model", "tiny", "--mock-data", "--plan", str(path), "--train-iters", "1", "--lr", "1e-3",
                       "--optimizer", "muon"], {"WORLD_SIZE": "2"})  # fmt: skip


def test_flags_give_the_rates() -> None:
    assert configure(MUON, {"WORLD_SIZE": "1"}).optimizer.muon == MuonRates()
    more = ["--muon-nesterov", "--muon-coefficient-type", "simple", "--muon-scale-mode", "shape_scaling",
            "--muon-num-ns-steps", "6", "--muon-momentum", "0.9", "--muon-tp-mode", "distributed"]  # fmt: skip
    found = configure([*MUON, *more], {"WORLD_SIZE": "1"}).optimizer.muon
    assert found == MuonRates(0.9, True, 6, "simple", "shape_scaling", 1.0)
