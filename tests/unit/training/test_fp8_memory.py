"""What products in fp8 need for a while is in the estimate, as a dry run allocates it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans import dump_yaml, plan_from_dict
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.spec import load_model
from tests.support.small_plans import pipe, plan, stage


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_dry_run_allocates_what_the_estimate_says(recipe: str, tmp_path: Path) -> None:
    spec, path = load_model("tiny"), tmp_path / "plan.yaml"
    spelled = plan(
        [pipe(2, 3, stage([0], [0, 3], tp=1), stage([1], [3, 6], tp=1, dtype="bf16"))], seq_length=128
    )
    path.write_text(dump_yaml(plan_from_dict(spelled, spec)))
    flags = ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe]
    run = configure(["--plan", str(path), "--model", "tiny", "--dry-run", *flags], {"WORLD_SIZE": "2"})
    # Weights that outweigh what else a stage works with.
    run = replace(run, spec=replace(run.spec, ffn_hidden_size=8192))
    plain = estimate_memory(run.plan, run.spec, run.dtype)
    found = estimate_memory(run.plan, run.spec, run.dtype, fp8=run.fp8)
    assert found[0].total > plain[0].total and found[1] == plain[1]
    for rank in (0, 1):
        peak = run_rank(run, rank).peak
        assert 0.85 * peak <= found[rank].total <= 1.35 * peak, (rank, found[rank].total / peak)
