"""The dry run of one rank against real ranks, and the memory formulas against both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetero_megatron.cli.configure import configure
from hetero_megatron.comm import Comm
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.dry_run.allocator import MemoryTracker
from hetero_megatron.dry_run.one_rank import _batch, run_rank
from hetero_megatron.errors import UserError
from hetero_megatron.model import initial_values
from hetero_megatron.plans import Plan, dump_yaml, plan_from_dict
from hetero_megatron.plans.memory.memory_report import format_memory
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.spec import load_model
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.training.config import OptimizerConfig, RunConfig
from hetero_megatron.training.kernels import shape_kernels
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.train import optimizer_factory
from tests.support.pool import shared_pool
from tests.support.programs import run_ranks
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

SPELLED = plan(
    [
        pipe(2, 3, stage([4, 1], [0, 4], tp=2, tp_split=[3, 1], recompute={"first": 1}), stage([2], [4, 6])),
        pipe(2, 1, stage([3, 0], [0, 6], tp=1, dp_split=[1, 1], optimizer={"share": 3})),
        pipe(
            2,
            1,
            stage(
                [7, 6, 5],
                [0, 6],
                context=[
                    {"ranks": [7, 5], "tokens": [20, 12], "heads": [5, 3]},
                    {"ranks": [6], "tokens": [16], "heads": [8]},
                ],
            ),
        ),
    ],
    seq_length=48,
)


HOST = {"optimizer": {"offload": True}}
OFFLOADED = plan(
    [
        pipe(2, 3, stage([0, 1], [0, 4], tp=2, tp_split=[3, 1], **HOST), stage([2], [4, 6])),
        pipe(2, 1, stage([3, 4], [0, 6], tp=1, dp_split=[1, 1], optimizer={"offload": True, "share": 3})),
    ],
    seq_length=48,
)


def config(dtype: str, directory: Path, spelled: Any = SPELLED) -> RunConfig:
    path = directory / "plan.yaml"
    path.write_text(dump_yaml(plan_from_dict(spelled, load_model("tiny"))))
    flags = {"fp32": [], "bf16": ["--bf16"]}[dtype]
    return configure(["--plan", str(path), "--model", "tiny", "--dry-run", *flags], {"WORLD_SIZE": "8"})


def real_step(comm: Comm, run: RunConfig) -> tuple[dict[int, int], int, int] | None:
    """(bytes sent by rank, bytes of weights, bytes of moments and copied masters) of one real step."""
    comm.create_groups(run.compiled.groups)
    if comm.rank not in run.plan.ranks:
        return None
    runtime = Runtime(
        run.compiled,
        comm,
        DTYPES[run.dtype],
        lambda t, box: initial_values(t, box, run.spec, 0),
        optimizer_factory(OptimizerConfig()),
    )
    before = dict(comm.sent_bytes)
    tokens = torch.zeros(8, run.plan.seq_length, dtype=torch.int64)

    def fetch(indices: Any) -> Any:
        from hetero_megatron.data.batch import Batch

        rows = tokens[: len(indices)]
        return Batch(rows, rows, torch.arange(rows.shape[1]).expand(rows.shape))

    runtime.train_step(fetch, 0, run.plan.global_batch_size, 1e-3)
    assert runtime.optimizer is not None and runtime.optimizer.inner is not None
    states = runtime.optimizer.inner.state.values()
    moments = sum(t.nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor) and t.dim())
    own = {p.untyped_storage().data_ptr() for p in runtime.sync.params.values()}
    masters = [m for per in runtime.optimizer.masters for m in per]
    copies = sum(m.nbytes for m in masters if m.untyped_storage().data_ptr() not in own)
    weights = sum(p.nbytes for p in runtime.sync.params.values())
    return {r: n - before.get(r, 0) for r, n in comm.sent_bytes.items()}, weights, moments + copies


@pytest.mark.parametrize("dtype", quick(["fp32", "bf16"], [], ["bf16"]))
def test_a_dry_rank_sends_and_holds_what_a_real_one_does(dtype: str, tmp_path: Path) -> None:
    run = config(dtype, tmp_path)
    real = shared_pool().run(real_step, run)
    estimates = estimate_memory(run.plan, run.spec, run.dtype)
    for rank in run.plan.ranks:
        dry, (sent, weights, optimizer) = run_rank(run, rank), real[rank]
        total: dict[int, int] = {}
        for by_rank in dry.sent.values():
            for peer, count in by_rank.items():
                total[peer] = total.get(peer, 0) + count
        assert total == {r: n for r, n in sent.items() if n}
        assert (dry.parameters, dry.optimizer) == (weights, optimizer)
        estimate = estimates[rank]
        assert estimate.weights == weights
        assert estimate.optimizer == optimizer
        # The formula adds up what is rarely alive at the same time: it is right within a factor.
        assert 0.75 * dry.peak <= estimate.total <= 1.6 * dry.peak


@pytest.mark.slow
def test_the_gradient_of_an_embedding_is_in_the_estimate(tmp_path: Path) -> None:
    """It is as large as the embedding, and a tied head's waits for it: most of what small models with large
    vocabularies hold."""
    one = plan([pipe(1, 4, stage([0], [0, 2]))], seq_length=64)
    two = plan([pipe(1, 4, stage([0], [0, 1]), stage([1], [1, 2]))], seq_length=64)
    for i, (spelled, tied, dtype) in enumerate((
        (one, True, ["--dtype", "fp32"]), (one, True, ["--bf16"]), (two, False, ["--dtype", "fp32"]),
        ({**two, "schedule": "zero-bubble"}, True, ["--bf16"]),
    )):  # fmt: skip
        model, path = tmp_path / f"{i}.json", tmp_path / f"{i}.yaml"
        model.write_text(json.dumps({
            "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
            "intermediate_size": 128, "vocab_size": 8192, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": tied,
        }))  # fmt: skip
        path.write_text(dump_yaml(plan_from_dict(spelled, load_model(str(model)))))
        words = ["--plan", str(path), "--model", str(model), "--dry-run", *dtype]
        run = configure(words, {"WORLD_SIZE": "1" if spelled is one else "2"})
        dry, estimate = run_rank(run, 0), estimate_memory(run.plan, run.spec, run.dtype)[0]
        assert 0.995 * dry.peak <= estimate.total <= 1.02 * dry.peak, (i, estimate.total / dry.peak)


@pytest.mark.parametrize("way", quick(range(6), [], [0]))
def test_divided_weights_are_in_the_estimate_to_the_byte(way: int, tmp_path: Path) -> None:
    """Shares 5:1 and with TP 2:1:0:3; ten micro-batches, of which a dry run repeats most."""
    kind, schedule, dtype = [
        ({"gather": "layer"}, "1f1b", "bf16"), ({"gather": "micro-batch"}, "zero-bubble", "fp32"),
        ({"gather": "step"}, "1f1b", "fp32"), ({"reshard_after_forward": False}, "gpipe", "bf16"),
        ({"gather": "layer"}, "zero-bubble", "fp32"), ({"reshard_after_forward": False}, "1f1b", "bf16"),
    ][way]  # fmt: skip
    first = stage([0, 1], [0, 4], dp_split=[1, 3], weights={"shard": [5, 1], **kind})
    second = stage([2, 3, 4, 5], [4, 6], tp=2, dp_split=[3, 1], weights={"shard": [2, 1, 0, 3], **kind})
    run = config(dtype, tmp_path, plan([pipe(4, 10, first, second)], seq_length=48, schedule=schedule))
    run = replace(run, spec=replace(run.spec, hidden_size=256, ffn_hidden_size=700))
    estimates = estimate_memory(run.plan, run.spec, run.dtype)
    for rank in run.plan.ranks:
        dry, estimate = run_rank(run, rank), estimates[rank]
        if kind.get("reshard_after_forward", True):
            assert dry.parameters == estimate.weights
        assert dry.parameters <= estimate.weights and dry.optimizer == estimate.optimizer
        assert 0.97 * dry.peak <= estimate.total <= 1.25 * dry.peak, (rank, dry.peak, estimate)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["layer", "step"])
def test_the_gradient_of_an_embedding_that_a_context_group_divides_is_in_the_estimate(
    gather: str, tmp_path: Path
) -> None:
    halves = {"context": [{"ranks": [0, 1], "tokens": [24, 24], "heads": [4, 4]}], "weights": {"gather": gather}}
    pipelines = [pipe(2, 3, stage([0, 1], [0, 3], **halves), stage([2], [3, 6])), pipe(3, 2, stage([3], [0, 6]))]
    run = config("fp32", tmp_path, plan(pipelines, seq_length=48))
    run = replace(run, spec=replace(run.spec, hidden_size=512, ffn_hidden_size=700, vocab_size=8192))
    dry, estimate = run_rank(run, 0), estimate_memory(run.plan, run.spec, run.dtype)[0]
    assert dry.peak <= estimate.total <= 1.15 * dry.peak, (dry.peak, estimate)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_divided_weights_of_a_tied_head_and_of_chunks_are_in_the_estimate(schedule: str, tmp_path: Path) -> None:
    """The gradient of a tied matrix is there from the head's backward to the embedding's; chunks of unlike sizes leave
    unlike gradients under way."""
    tied, halves = schedule == "1f1b", {"dp_split": [2, 2], "weights": {"shard": [3, 1]}}
    stages = [stage([0, 1], [[0, 2], [4, 5]], **halves), stage([2, 3], [[2, 4], [5, 6]], **halves)]
    stages = [stage([0, 1], [0, 6], **halves)] if tied else stages
    run = config("fp32", tmp_path, plan([pipe(4, 2 if tied else 4, *stages)], seq_length=48, schedule=schedule))
    spec = replace(run.spec, hidden_size=256, ffn_hidden_size=700, vocab_size=8192, tied=tied)
    run = replace(run, spec=spec)
    estimates = estimate_memory(run.plan, run.spec, run.dtype)
    for rank in run.plan.ranks[-2:]:
        dry, estimate = run_rank(run, rank), estimates[rank]
        assert 0.97 * dry.peak <= estimate.total <= 1.25 * dry.peak, (rank, dry.peak, estimate)


@pytest.mark.slow
def test_a_dry_rank_sends_what_a_real_one_with_divided_weights_does(tmp_path: Path) -> None:
    first = stage([0, 1, 2], [0, 4], dp_split=[1, 2, 1], weights={"shard": [5, 1, 2]})
    second = stage([3, 4], [4, 6], dp_split=[3, 1], weights={"shard": [1, 3], "gather": "micro-batch"})
    other = stage([5, 6], [0, 6], weights={"shard": [1, 2]})
    run = config("bf16", tmp_path, plan([pipe(4, 5, first, second), pipe(2, 2, other)], seq_length=48))
    real = shared_pool().run(real_step, run)
    for rank in run.plan.ranks:
        total: dict[int, int] = {}
        for by_rank in (dry := run_rank(run, rank)).sent.values():
            for peer, count in by_rank.items():
                total[peer] = total.get(peer, 0) + count
        sent, _, optimizer = real[rank]
        assert total == {r: n for r, n in sent.items() if n} and dry.optimizer == optimizer


SPLIT = plan(
    [
        pipe(2, 5, stage([0, 1], [0, 3], tp=2), stage([2], [3, 4], recompute="full"), stage([3], [4, 6])),
        pipe(2, 4, stage([4, 5, 6], [0, 4], context=[
            {"ranks": [4, 5], "tokens": [20, 12], "heads": [5, 3]}, {"ranks": [6], "tokens": [16], "heads": [8]},
        ]), stage([7], [4, 6], recompute="selective")),
    ],
    seq_length=48, schedule="zero-bubble",
)  # fmt: skip
SPLIT["pipelines"][0]["in_flight"] = [5, 3, 2]
CHUNKS = plan(
    [
        pipe(2, 5, stage([0, 1], [[0, 1], [3, 5]], tp=2, recompute={"first": 2}), stage([2], [[1, 3], [5, 6]])),
        pipe(2, 7, stage([3], [[0, 1], [2, 4]], recompute="full"), stage([4, 5], [[1, 2], [4, 6]], tp=2)),
        pipe(2, 1, stage([6], [[0, 3], [3, 6]])), pipe(2, 2, stage([7], [0, 6])),
    ],
    seq_length=48, schedule="interleaved",
)  # fmt: skip


@pytest.mark.parametrize("dtype", quick(["fp32", "bf16"], [], ["bf16"]))
@pytest.mark.parametrize("spelled", [SPLIT, CHUNKS], ids=["zero-bubble", "interleaved"])
def test_chunks_and_weight_gradients_that_wait_are_in_the_estimate(
    dtype: str, spelled: dict[str, Any], tmp_path: Path
) -> None:
    run = config(dtype, tmp_path, spelled)
    estimates = estimate_memory(run.plan, run.spec, run.dtype)
    for rank in run.plan.ranks:
        dry = run_rank(run, rank)
        assert 0.75 * dry.peak <= estimates[rank].total <= 1.6 * dry.peak, rank


@pytest.mark.slow
def test_the_estimate_goes_through_chunks_where_the_run_does(tmp_path: Path) -> None:
    """A vocabulary that outweighs the model, replicas of seven rows and of one: either both go through chunks or none,
    also where the logits of one row alone are within the limit."""
    spelled = plan([pipe(8, 1, stage([0, 1], [0, 6], tp=1, dp_split=[7, 1]))], seq_length=512)
    run = config("bf16", tmp_path, spelled)
    run = replace(run, spec=replace(run.spec, vocab_size=200_000))
    row = 512 * 200_000 * 4
    for limit in (LOGITS_BYTES, row // 2, 2 * row, 6 * row, 7 * row):
        estimates = estimate_memory(run.plan, run.spec, run.dtype, logits_bytes=limit)
        for rank in run.plan.ranks:
            peak = run_rank(replace(run, logits_bytes=limit), rank).peak
            assert peak <= estimates[rank].total <= 1.35 * peak, (limit / row, rank)


@pytest.mark.parametrize("dtype", quick(["fp32", "bf16"], [], ["bf16"]))
def test_an_offloaded_optimizer_is_in_the_hosts_memory(dtype: str, tmp_path: Path) -> None:
    run = config(dtype, tmp_path, OFFLOADED)
    real, estimates = shared_pool().run(real_step, run), estimate_memory(run.plan, run.spec, run.dtype)
    plain = {r: m.optimizer for r, m in estimate_memory(_without_offload(run.plan), run.spec, run.dtype).items()}
    for rank in run.plan.ranks:
        dry, (_, _, optimizer), estimate = run_rank(run, rank), real[rank], estimates[rank]
        assert dry.optimizer == optimizer and dry.offload == (rank != 2)
        if dry.offload:
            assert estimate.optimizer == 0 and estimate.host == optimizer  # masters are copies in any dtype
            assert 0.75 * dry.peak <= estimate.total <= 1.6 * dry.peak
        else:
            assert estimate.host == 0 and estimate.optimizer == plain[rank]
    text = format_memory(estimates)
    assert text.splitlines()[1].endswith("host") and "host" not in format_memory({2: estimates[2]})


@pytest.mark.parametrize("kind", quick(["adam fp32", "adam bf16", "sgd fp32", "offload bf16"], [], ["adam bf16"]))
def test_the_peak_is_that_of_a_later_step(kind: str, tmp_path: Path) -> None:
    """The first step's would be too small: its moments appear only at its end."""
    name, dtype = kind.split()
    run = config(dtype, tmp_path, OFFLOADED if name == "offload" else SPELLED)
    run = replace(run, optimizer=OptimizerConfig(name="sgd" if name == "sgd" else "adam"))
    for rank in run.plan.ranks[::2]:
        first, second = peaks_of_steps(run, rank)
        assert run_rank(run, rank).peak == second and (name == "offload" or second > first)


def peaks_of_steps(run: RunConfig, rank: int) -> tuple[int, int]:
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker() as memory:
        comm = FakeComm(rank, torch.device("cpu"))
        comm.create_groups(run.compiled.groups)
        runtime = Runtime(
            run.compiled, comm, DTYPES[run.dtype],
            lambda _, box: torch.empty(box.shape), optimizer_factory(run.optimizer),
            kernels=shape_kernels(run, rank, DTYPES[run.dtype]),
            options=RuntimeOptions(logits_bytes=run.logits_bytes),
        )  # fmt: skip
        optimizer, peaks = runtime.optimizer, []
        assert optimizer is not None and optimizer.inner is not None
        if optimizer.offload:
            memory.forget(m for per in optimizer.masters for m in per)
        for _ in range(2):
            work = runtime.work(lambda ix: _batch(len(ix), run.plan.seq_length), 0, run.plan.global_batch_size)
            runtime.executor.run(work)
            grads = runtime.sync.finish()
            before = memory.peak
            optimizer.step(grads, 1.0)
            if optimizer.offload:  # the moments of the first step; an update needs less than a backward here
                memory.forget(t for s in optimizer.inner.state.values() for t in s.values() if hasattr(t, "dim"))
                memory.peak = before
            peaks.append(memory.peak)
            del grads
    return peaks[0], peaks[1]


def _without_offload(chosen: Plan) -> Plan:
    stages = lambda p: tuple(replace(s, optimizer=replace(s.optimizer, offload=False)) for s in p.stages)  # noqa: E731
    return replace(chosen, pipelines=tuple(replace(p, stages=stages(p)) for p in chosen.pipelines))


@pytest.mark.parametrize("schedule", quick(["1f1b", "gpipe", "zero-bubble", "interleaved"], [], ["interleaved"]))
def test_micro_batches_that_are_not_run_count_as_those_that_are(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers, so that stages are small: a stage without layers, TP, recompute, context groups, a head."""
    spec = replace(load_model("tiny"), num_layers=2)
    context = [{"ranks": [6, 7], "tokens": [6, 4], "heads": [5, 3]}]
    spelled = plan(
        [
            pipe(2, 9, stage([5], [], embed=True), stage([4, 1], [0, 1], tp=2, tp_split=[3, 1], recompute="full"),
                 stage([0, 2, 3], [1, 2], tp_split=[1, 1, 1])),
            pipe(1, 5, stage([6, 7], [0, 2], context=context)),
        ],
        schedule=schedule,
    )  # fmt: skip
    if schedule == "interleaved":
        first, second, third = spelled["pipelines"][0]["stages"]
        first["layers"], second["layers"], third["layers"] = [[0, 0], [1, 1]], [[0, 1], [1, 2]], [[1, 1], [2, 2]]
        spelled["pipelines"][1]["stages"][0]["layers"] = [[0, 1], [1, 1], [1, 2]]
    run = replace(config("bf16", tmp_path), spec=spec, plan=plan_from_dict(spelled, spec))
    repeated = {rank: replace(run_rank(run, rank), seconds=0.0) for rank in (5, 4, 1, 2, 7)}
    monkeypatch.setattr("hetero_megatron.dry_run.one_rank.RepeatingExecutor", lambda executor, _: executor)
    for rank, found in repeated.items():
        assert found == replace(run_rank(run, rank), seconds=0.0)


def test_offload_of_what_cannot_be_is_refused_in_a_dry_run(tmp_path: Path) -> None:
    run = replace(config("fp32", tmp_path, OFFLOADED), optimizer=OptimizerConfig(name="sgd"))
    with pytest.raises(UserError, match="optimizer.offload"):
        run_rank(run, 0)


def test_the_command_prints_memory_and_the_rank() -> None:
    words = ["--plan", "examples/plans/demo.yaml", "--model", "tiny", "--dry-run", "--as-rank", "2"]
    said, _ = run_ranks(1, words)
    assert "estimated memory per rank" in said and "rank 2: pipeline 0, stage 1" in said
