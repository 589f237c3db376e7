"""The dry run of one rank of a mixture of experts against real ranks, and the memory formulas against both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans import dump_yaml, plan_from_dict
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.spec import load_model
from hetero_megatron.training.config import RunConfig
from tests.distributed.training.test_dry_run import real_step
from tests.support.moe_models import MOE_FAMILIES
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

LARGER = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "vocab_size": 160}
SPELLED = plan([
    pipe(3, 4,
         stage([0, 1], [0, 1], tp=1, dp_split=[2, 1], experts=[{"ranks": [0, 1], "experts": [[0, 4], [4, 5]]}]),
         stage([2, 3], [1, 2], tp=2)),
    pipe(3, 2, stage([4, 5, 6], [0, 2], tp=1, dp_split=[1, 1, 1], experts=[
        {"ranks": [6, [5, 4]], "experts": [[0, 2], [1, 5]], "split": [[1], [2, 1]]}])),
], seq_length=48) | {"islands": [[4, 5], [6]]}  # tokens of 6 go to 4 and 5 in two hops  # fmt: skip


def config(dtype: str, top_k: int, directory: Path) -> RunConfig:
    model = directory / "config.json"
    model.write_text(json.dumps(MOE_FAMILIES["qwen2_moe"] | LARGER | {"num_experts_per_tok": top_k}))
    path = directory / "plan.yaml"
    path.write_text(dump_yaml(plan_from_dict(SPELLED, load_model(str(model)))))
    flags = {"fp32": [], "bf16": ["--bf16"]}[dtype]
    return configure(["--plan", str(path), "--model", str(model), "--dry-run", *flags], {"WORLD_SIZE": "8"})


def total(sent: dict[str, Any]) -> dict[int, int]:
    found: dict[int, int] = {}
    for by_rank in sent.values():
        for peer, count in by_rank.items():
            found[peer] = found.get(peer, 0) + count
    return found


@pytest.mark.parametrize("case", quick(["fp32 5", "bf16 5", "fp32 2"], [], ["bf16 5"]))
def test_a_dry_rank_sends_and_holds_what_a_real_one_does(case: str, tmp_path: Path) -> None:
    """Where every token goes to all experts nothing depends on values; else the bytes are those expected."""
    dtype, top_k = case.split()[0], int(case.split()[1])
    run = config(dtype, top_k, tmp_path)
    real, estimates = shared_pool().run(real_step, run), estimate_memory(run.plan, run.spec, run.dtype)
    for rank in run.plan.ranks:
        dry, (sent, weights, optimizer) = run_rank(run, rank), real[rank]
        found, wanted = total(dry.sent), {r: n for r, n in sent.items() if n}
        if top_k == 5:
            assert found == wanted, rank
        else:
            assert sum(found.values()) == pytest.approx(sum(wanted.values()), rel=0.25)
        assert (dry.parameters, dry.optimizer) == (weights, optimizer)
        estimate = estimates[rank]
        assert estimate.weights == weights
        assert 0.7 * optimizer <= estimate.optimizer <= optimizer  # without the copies of non-contiguous pieces
        assert 0.88 * dry.peak <= estimate.total <= 1.15 * dry.peak, (rank, estimate.total / dry.peak)
