"""Multi-token prediction under any plan is one process' over transformers' layers, in fp64."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_megatron.data.batch import Batch, look_ahead
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.spec.flops import layer_attention_flops, parameter_count, sequence_flops
from hetero_megatron.spec.moe import Balancing
from tests.distributed.training.test_dry_run import config
from tests.support.hf_reference import make_hf
from tests.support.moe_models import DEEPSEEK_V3, GLM4_MOE
from tests.support.mtp_reference import add_predictions
from tests.support.parity import Case, check_case, fixed_case, random_case
from tests.support.pool import shared_pool
from tests.support.programs import inside
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

SEED = int(os.environ.get("SEED", "5026"))
COUNT = int(os.environ.get("N", "4"))
QUICK = range(0)  # in `make test`
SLOW = (0, 1)
TIED = LLAMA | {"tie_word_embeddings": True}
ALL = Balancing(0.01, 0.02, 0.003)
CASES = {
    "one_rank": fixed_case(LLAMA, plan([pipe(2, 2, stage([0], [0, 3]))]), predictions=1),
    "stages_tp_documents": fixed_case(
        LLAMA, plan([pipe(1, 3, stage([0, 1], [0, 1], tp=2), stage([2, 3, 4], [1, 3], tp=3, tp_split=[3, 2, 1]))]),
        predictions=2, packed=True, masked=True,
    ),
    # Tied: the last stage multiplies by the matrix that it looks up, too. A last stage of modules alone.
    "tied_stage_of_its_own": fixed_case(
        TIED, plan([pipe(2, 3, stage([0], [0, 2]), stage([1, 2], [2, 3], tp=2), stage([3], [])),
                    pipe(1, 2, stage([4], [0, 3]))]),
        predictions=2, chunked_loss=True,
    ),
    "zero_bubble_recompute": fixed_case(
        TIED, plan([pipe(2, 3, stage([0], [0, 1], recompute="full"), stage([1, 2], [1, 3], tp=2, recompute="full")),
                    pipe(1, 1, stage([3], [0, 3], recompute="elementwise"))], schedule="zero-bubble"),
        predictions=1, packed=True,
    ),
    "chunks_on_one_stage": fixed_case(
        TIED, plan([pipe(2, 3, stage([0, 1], [[0, 1], [1, 1], [1, 3]], tp=2, recompute="selective"))],
                   schedule="interleaved"),
        predictions=1, optimizer="sgd",
    ),
    # The shift crosses the borders of what ranks have of a sequence.
    "context_of_tp_groups": fixed_case(
        LLAMA, plan([pipe(1, 2, stage([0, 1, 2, 3, 4, 5], [0, 3], tp_split=[2, 1], kv={"block": 2}, context=[
            {"ranks": [[5, 2], [3, 0]], "tokens": [4, 2], "heads": [2, 4]},
            {"ranks": [[1, 4]], "tokens": [4], "heads": [6]}]))]),
        predictions=2, packed=True, masked=True,
    ),
    "dropout_replicas": fixed_case(
        LLAMA, plan([pipe(4, 1, stage([0, 1], [0, 3], tp=1, dp_split=[3, 1])), pipe(2, 2, stage([2], [0, 3]))]),
        predictions=1, masked=True,
    ),
    "latent_attention_and_experts": fixed_case(
        DEEPSEEK_V3, plan([pipe(2, 2, stage([0], [0, 1]), stage([1, 2], [1, 3], tp=1, experts=[
            {"ranks": [1, 2], "experts": [[0, 5], [3, 8]]}]), stage([3], []))]),
        predictions=1, masked=True, balancing=ALL,
    ),
    "muon": fixed_case(
        LLAMA, plan([pipe(2, 2, stage([0], [0, 2]), stage([1, 2], [2, 3], tp=2)), pipe(1, 1, stage([3], [0, 3]))]),
        predictions=1, optimizer="muon",
    ),
    "experts_tp": fixed_case(
        GLM4_MOE, plan([pipe(2, 2, stage([0, 1], [0, 3], tp=2, tp_split=[1, 2]))]),
        predictions=2, balancing=ALL, packed=True,
    ),
}  # fmt: skip


FAST = ["stages_tp_documents", "tied_stage_of_its_own", "latent_attention_and_experts"]


@pytest.mark.parametrize("name", quick(list(CASES), FAST))
def test_a_plan_with_modules_equals_one_process(name: str) -> None:
    check_case(CASES[name], shared_pool())


# Families whose model classes call their parts as Llama's does.
PLAIN = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "smollm3", "glm4", "phi3",
    "granite", "exaone4", "helium", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3",
}  # fmt: skip


def random_cases(count: int, dtype: str = "fp64") -> list[Case]:
    found = list[Case]()
    for seed in range(SEED, SEED + 60 * count):
        case = random_case(seed, dtype)
        if case.model["model_type"] in PLAIN and len(found) < count:
            found.append(replace(case, predictions=1 + seed % 2))
    return found


@pytest.mark.parametrize("index", quick(range(COUNT), QUICK, SLOW))
def test_random_plans_with_modules_equal_one_process(index: int) -> None:
    check_case(random_cases(index + 1)[-1], shared_pool())


MEMORY = plan([
    pipe(2, 3, stage([0], [0, 4]), stage([1, 2], [4, 6], tp=2)),
    pipe(2, 2, stage([3], [0, 5], recompute="full"), stage([4], [5, 6], recompute="full")),
], seq_length=64)  # fmt: skip


@pytest.mark.slow
def test_memory_of_modules_is_that_of_dry_runs(tmp_path: Path) -> None:
    """Weights to the byte; the peak of stages with modules."""
    run = config("bf16", tmp_path, MEMORY)
    run = replace(run, spec=replace(run.spec, mtp_layers=2))
    estimates = estimate_memory(run.plan, run.spec, run.dtype)
    for rank in (2, 4):
        dry = run_rank(run, rank)
        assert estimates[rank].weights == dry.parameters
        assert 0.95 * dry.peak <= estimates[rank].total <= 1.1 * dry.peak, rank


def test_parameters_and_flops_of_modules() -> None:
    hf, spec = make_hf(DEEPSEEK_V3, 3)
    before, whole = spec, add_predictions(hf, spec, 2, 0.1, 3)
    held = [*hf.parameters(), *(b for n, b in hf.named_buffers() if n.endswith("correction_bias"))]
    assert parameter_count(whole) == sum(x.numel() for x in held)
    assert spec.moe is not None
    matrices = 0.0
    for name, param in hf.model.layers[spec.num_layers].named_parameters():
        used = spec.moe.top_k / spec.moe.num_experts if ".experts." in name else 1.0
        matrices += used * param.numel() * (param.dim() > 1)
    length = 16
    each = 2 * length * (matrices + spec.vocab_size * spec.hidden_size)
    each += layer_attention_flops(spec, length * (length + 1) // 2)
    more = sequence_flops(whole, length) - sequence_flops(before, length)
    assert more == pytest.approx(3 * 2 * each, rel=1e-6)


def test_targets_ahead_are_those_of_the_whole_sequence() -> None:
    """Against a loop over positions, with documents and a mask; taken apart after it."""
    rng = torch.Generator().manual_seed(1)
    labels, mask = torch.randint(1, 90, (2, 9), generator=rng), torch.rand(2, 9, generator=rng) < 0.7
    starts = [[0, 4], [0, 1, 7]]
    batch = look_ahead(Batch(labels, labels, labels, mask, starts), 3).select([(5, 9), (0, 2)])
    for k, ahead in enumerate(batch.ahead, start=1):
        for row in range(2):
            for column, i in enumerate((5, 6, 7, 8, 0, 1)):
                inside = i + k < 9 and not any(i < start <= i + k for start in starts[row])
                counts = inside and bool(mask[row, i + k])
                assert ahead.mask[row, column] == counts
                assert ahead.tokens[row, column] == (labels[row, i + k - 1] if inside else 0)
                assert ahead.labels[row, column] == (labels[row, i + k] if counts else 0)


def test_the_console_has_means_over_the_interval(tmp_path: Path) -> None:
    words = "--model tiny --mock-data --seq-length 16 --micro-batch-size 1 --global-batch-size 2 --lr 1e-2"
    words += f" --mtp-num-layers 1 --train-iters 3 --log-interval 3 --log-format megatron --save {tmp_path}"
    out, _ = inside(words.split())
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name in ("lm loss", "mtp_1 loss"):
        key = "loss" if name == "lm loss" else name
        (shown,) = re.findall(rf"{name}: ([0-9.E+-]+)", out)
        assert float(shown) == pytest.approx(sum(step[key] for step in steps if key in step) / 3, rel=1e-4)
