"""Memory of adapters beside a frozen base: formulas against dry runs, and what the planner finds with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.main import main
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans import dump_yaml, plan_from_dict
from hetero_megatron.plans.made_for import model_hash
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.spec import Lora, adapted, load_model
from hetero_megatron.spec.flops import parameter_count, sequence_flops, trained_count
from hetero_megatron.spec.lora import TARGETS, sites_of
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

CARDS = """\
version: 1
nodes:
  - {name: big, chip: card24, chips_per_node: 2, host_memory: 128 GiB}
  - {name: small, chip: card16, host_memory: 56 GiB}
chips:
  card24: {memory: 24 GiB, tflops: {bf16: 140}, memory_bandwidth: 900 GB/s}
  card16: {memory: 16 GiB, tflops: {bf16: 60}, memory_bandwidth: 450 GB/s}
links:
  intra_node: {bandwidth: 20 GB/s, latency: 10 us}
  inter_node: {bandwidth: 1.2 GB/s, latency: 30 us}
"""
SIZES = "--seq-length 2048 --global-batch-size 16"
PLANS: dict[str, Any] = {
    "pipeline": plan([pipe(1, 8, stage([0], [0, 5]), stage([1], [5, 8]))], seq_length=1024),
    "tp": plan([pipe(2, 2, stage([0, 1, 2], [0, 8], tp=3, tp_split=[2, 1, 1], recompute="full"))], seq_length=1024),
    "first": plan([pipe(1, 4, stage([0], [0, 5], recompute={"first": 2}), stage([1, 2], [5, 8], tp=2))],
                  seq_length=512),
}  # fmt: skip


EIGHT_LAYERS = {  # of Llama 2 7B
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
HALF_AS_WIDE = {"num_hidden_layers": 2, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 5504}
CASES = [(name, two, dtype, None) for name in PLANS for two in (False, True) for dtype in ("bf16", "fp32")]
KINDS = [("first", False, "bf16", "int8"), ("tp", True, "bf16", "int8"), ("tp", False, "bf16", "dora"),
         ("pipeline", False, "fp32", "dora")]  # fmt: skip


@pytest.mark.parametrize("case", quick(CASES + KINDS, [], CASES[8:9] + KINDS[:1]))
def test_memory_is_predicted(case: tuple[str, bool, str, str | None], tmp_path: Path) -> None:
    """Within 5 % of what a dry run has at its peak, on every rank."""
    name, two, dtype, kind = case
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_LAYERS))
    base = load_model(str(tmp_path / "config.json"))
    targets = ("q_proj", "v_proj") if two else TARGETS
    lora = Lora(16, 32.0, targets, base_dtype="int8" if kind == "int8" else None, dora=kind == "dora")
    made = plan_from_dict(PLANS[name], adapted(base, lora))
    (tmp_path / "plan.yaml").write_text(dump_yaml(made))
    words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run"]
    words += ["--lora-rank", "16", "--dtype", dtype, "--lora-targets", *targets]
    words += {"int8": ["--lora-base-dtype", "int8"], "dora": ["--use-dora"], None: []}[kind]
    run = configure(words, {})
    predicted = estimate_memory(run.plan, run.spec, dtype)
    for rank in run.plan.ranks:
        found = run_rank(run, rank)
        assert abs(predicted[rank].total - found.peak) <= 0.05 * found.peak, (rank, predicted[rank], found)


@pytest.mark.slow
def test_memory_of_adapters_that_differ_by_layer_is_predicted(tmp_path: Path) -> None:
    """Within 5 % of the peak; layers before the first one with adapters keep nothing for backward."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_LAYERS | HALF_AS_WIDE | {"num_hidden_layers": 8}))
    base = load_model(str(tmp_path / "config.json"))
    for name, sites in (
        ("pipeline", ["6-7:q_proj,v_proj,down_proj:64", "7:o_proj:8"]), ("first", ["4-7:q_proj,v_proj"]),
    ):  # fmt: skip
        made = plan_from_dict(PLANS[name], adapted(base, Lora(16, 16.0, (), sites=sites_of(sites, 16))))
        (tmp_path / "plan.yaml").write_text(dump_yaml(made))
        words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run", "--bf16"]
        run = configure([*words, "--lora-rank", "16", "--lora-sites", *sites], {})
        predicted = estimate_memory(run.plan, run.spec, "bf16")
        for rank in run.plan.ranks:
            found = run_rank(run, rank)
            assert found.parameters == predicted[rank].weights
            assert abs(predicted[rank].total - found.peak) <= 0.05 * found.peak, (name, rank, predicted[rank], found)


@pytest.mark.slow
def test_a_divided_base_is_in_the_estimate_to_the_byte(tmp_path: Path) -> None:
    """Shares 5:1 and with TP 2:1:0:3; a base in 8 bits, whose scales every rank keeps. Its weights are exact; the
    whole is never below the peak (tests/distributed/training/test_divided_memory.py)."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_LAYERS | {"num_hidden_layers": 3}))
    base = load_model(str(tmp_path / "config.json"))
    for kind, dtype, gather in ((None, "bf16", "layer"), ("int8", "bf16", "micro-batch"), ("int8", "fp32", "layer")):
        way = {"gather": gather}
        first = stage([0, 1], [0, 2], dp_split=[1, 3], weights={"shard": [5, 1], **way})
        second = stage([2, 3, 4, 5], [2, 3], tp=2, dp_split=[3, 1], weights={"shard": [2, 1, 0, 3], **way})
        made = plan([pipe(4, 3, first, second)], seq_length=48)
        made = dump_yaml(plan_from_dict(made, adapted(base, Lora(16, 32.0, base_dtype=kind))))
        (tmp_path / "plan.yaml").write_text(made)
        words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run"]
        words += ["--lora-rank", "16", "--dtype", dtype, *(["--lora-base-dtype", kind] if kind else [])]
        run = configure(words, {})
        estimates = estimate_memory(run.plan, run.spec, dtype)
        assert run.compiled.frozen and all(set(b.ranks) in ({0, 1}, {2, 3, 4, 5}) for b in run.compiled.frozen)
        for rank in run.plan.ranks:
            dry, estimate = run_rank(run, rank), estimates[rank]
            assert dry.parameters == estimate.weights, (kind, dtype, way, rank)
            ratio = estimate.total / dry.peak
            assert 0.999 <= ratio <= 1.3, (kind, dtype, way, rank, ratio)


@pytest.mark.slow
def test_a_base_in_4_bits_is_in_the_estimate(tmp_path: Path) -> None:
    """Its weights to the byte, where cuts are inside blocks, too (5504 columns over 5:4:3); the peak within 5 %."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_LAYERS | HALF_AS_WIDE))
    base = load_model(str(tmp_path / "config.json"))
    made = plan([pipe(1, 2, stage([0, 1, 2], [0, 1], tp=3, tp_split=[5, 4, 3]), stage([3], [1, 2]))], seq_length=512)
    adapters = adapted(base, Lora(16, 16.0, base_dtype="nf4"))
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan_from_dict(made, adapters)))
    words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run", "--bf16"]
    run = configure([*words, "--lora-rank", "16", "--lora-base-dtype", "nf4"], {})
    estimates = estimate_memory(run.plan, run.spec, "bf16")
    for rank in run.plan.ranks:
        dry, estimate = run_rank(run, rank), estimates[rank]
        assert dry.parameters == estimate.weights, rank
        assert abs(estimate.total - dry.peak) <= 0.05 * dry.peak, (rank, estimate, dry)


@pytest.mark.slow
def test_a_divided_base_in_4_bits_is_in_the_estimate_to_the_byte(tmp_path: Path) -> None:
    """Blocks with their scales go to owners, scales of groups of blocks stay with all; 160 columns of 320 end inside a
    block, and that matrix is with both."""
    config = EIGHT_LAYERS | {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 320}))
    adapters = adapted(load_model(str(tmp_path / "config.json")), Lora(2, 2.0, base_dtype="nf4"))
    first = stage([0, 1], [0, 2], dp_split=[1, 3], weights={"shard": [5, 1]})
    second = stage([2, 3, 4, 5], [2, 3], tp=2, dp_split=[3, 1], weights={"shard": [2, 1, 0, 3], "gather": "step"})
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan_from_dict(plan([pipe(4, 1, first, second)], 48), adapters)))
    words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run", "--bf16"]
    run = configure([*words, "--lora-rank", "2", "--lora-alpha", "2", "--lora-base-dtype", "nf4"], {})
    estimates = estimate_memory(run.plan, run.spec, "bf16")
    for rank in run.plan.ranks:
        assert run_rank(run, rank).parameters == estimates[rank].weights, rank


EXPERTS = {
    "model_type": "qwen3_moe", "num_hidden_layers": 6, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "num_experts": 16, "moe_intermediate_size": 768, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
DIVIDED = plan([pipe(
    1, 4,
    stage([0, 1, 2], [0, 3], tp=3, tp_split=[2, 1, 1],
          experts=[{"ranks": [0, [1, 2]], "experts": [[0, 4], [4, 16]], "split": [[1], [2, 1]]}]),
    stage([3], [3, 6], recompute="full"),
)], seq_length=1024)  # fmt: skip


@pytest.mark.parametrize("case", quick(["experts", "dropout", "int8", "dora"], [], ["int8", "dora"]))
def test_memory_of_a_mixture_of_experts_is_predicted(case: str, tmp_path: Path) -> None:
    """Of adapters of unequally divided experts, and of attention with dropout, beside a frozen base, also in 8 bits."""
    experts, base_dtype = case != "dropout", "int8" if case == "int8" else None
    targets, dropout = (TARGETS, 0.0) if experts else (TARGETS[:4], 0.1)
    lora = Lora(16, 16.0, targets, dropout=dropout, base_dtype=base_dtype, dora=case == "dora")
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    base = load_model(str(tmp_path / "config.json"))
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan_from_dict(DIVIDED, adapted(base, lora))))
    words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run", "--bf16"]
    words += ["--lora-rank", "16", "--lora-targets", *lora.targets, "--lora-dropout", str(lora.dropout)]
    words += ["--lora-base-dtype", base_dtype] if base_dtype is not None else []
    run = configure([*words, *["--use-dora"] * lora.dora], {})
    predicted = estimate_memory(run.plan, run.spec, "bf16")
    for rank in run.plan.ranks:
        found = run_rank(run, rank)
        assert abs(predicted[rank].total - found.peak) <= 0.05 * found.peak, (rank, predicted[rank], found)


def test_what_is_frozen_costs_less() -> None:
    base = load_model("llama2-7b")
    spec = adapted(base, Lora(16, 16.0))
    assert trained_count(spec) == parameter_count(spec) - parameter_count(base) == 39_976_960  # as peft counts them
    assert 0.66 < sequence_flops(spec, 2048) / sequence_flops(base, 2048) < 0.72
    # A plan is for adapters of some ranks and places, whatever they count.
    assert model_hash(spec) == model_hash(adapted(base, Lora(16, 4.0, rslora=True)))
    others = (
        Lora(8, 16.0), Lora(16, 16.0, ("q_proj",)), Lora(16, 16.0, dropout=0.1), Lora(16, 16.0, base_dtype="int8"),
        Lora(16, 16.0, dora=True),
    )  # fmt: skip
    assert len({model_hash(adapted(base, lora)) for lora in others} | {model_hash(spec), model_hash(base)}) == 7


def command(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(words.split())
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("model", quick(["llama2-7b", "llama2-13b"], [], ["llama2-13b"]))
def test_adapters_fit_where_full_fine_tuning_fits_nowhere(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """7B with optimizers on the cards, 13B with optimizers in host memory, too, which has no room for all weights and
    gradients besides; the dry run agrees with the plan."""
    (tmp_path / "cards.yaml").write_text(CARDS)
    offload = "never" if model == "llama2-7b" else "auto"
    words = f"plan --model {model} --cluster {tmp_path}/cards.yaml {SIZES} --offload {offload} --quiet --no-baselines"
    code, _, err = command(words, capsys)
    assert code == 2 and "fits in no plan" in err
    code, out, err = command(f"{words} --lora-rank 16 --json --out {tmp_path}/plan.yaml", capsys)
    assert code == 0, err
    assert json.loads(out)["step_seconds"] > 0
    flags = f"--plan {tmp_path}/plan.yaml --cluster {tmp_path}/cards.yaml --model {model} --dry-run --lora-rank 16"
    run = configure(flags.split(), {})
    assert run.cluster is not None
    predicted = estimate_memory(run.plan, run.spec, run.dtype)
    for rank in run.plan.ranks:
        peak = run_rank(run, rank).peak
        assert peak <= run.cluster.chip_of(rank).memory
        assert abs(predicted[rank].total - peak) <= 0.05 * peak
    # The plan says what it was made for: predicted without the flag, as with it, and for no other rank.
    predict = f"predict --plan {tmp_path}/plan.yaml --cluster {tmp_path}/cards.yaml"
    code, unsaid, _ = command(predict, capsys)
    assert code == 0 and "rank 16" in unsaid
    assert command(f"{predict} --lora-rank 16", capsys)[:2] == (0, unsaid)
    code, _, err = command(f"{predict} --lora-rank 8", capsys)
    assert code == 2 and "made with --lora-rank 16" in err
