"""Ranks that were given other options or data than their peers refuse before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.comm.group import decode, encode
from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.training.agreement import ALIKE, run_facts
from hetero_megatron.training.config import RunConfig, ScheduleConfig
from tests.distributed.training.test_failures import TWO_REPLICAS, start

FLAGS = "--model tiny --mock-data --seq-length 32 --micro-batch-size 1 --train-iters 4 --lr 1e-3"
PARTLY = {
    "adapter", "checkpoint", "failure", "data", "load_hf", "save_hf", "reference_hf", "reference_logps", "teacher_hf",
    "teacher_scores", "role",
}  # fmt: skip
# The plan has a fingerprint; the others concern one rank alone, or (exit) are told to all when they come true.
FREE = {
    "plan", "cluster", "exit", "logging", "distributed", "deterministic", "alignment", "platform", "compile",
    "graphs_after", "dry_run", "as_rank", "notices", "model_directory", "allow_over_memory",
}  # fmt: skip


def test_every_option_is_compared_or_known_not_to_matter() -> None:
    assert {f.name for f in fields(RunConfig)} == set(ALIKE) | PARTLY | FREE


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("--clip-grad 0.5", "optimizer.clip_grad"), ("--optimizer sgd", "optimizer.name"),
        ("--weight-decay 0.2", "schedule.weight_decay.start"), ("--lr 2e-3", "schedule.learning_rate.peak"),
        ("--seed 2", "seed"), ("--bf16", "dtype"), ("--eod-mask-loss", "data.eod_mask_loss"),
        ("--save x --save-interval 7", "checkpoint.save_interval"), ("--check-for-spiky-loss", "failure.check_spikes"),
        ("--rampup-batch-size 1 1 4 --global-batch-size 2 --train-samples 8", "schedule.batch_size.start"),
        ("--eval-interval 2 --eval-iters 1", "evaluation.iterations"), ("--model llama3-8b", "spec.hidden_size"),
    ],
)  # fmt: skip
def test_options_that_change_numbers_are_facts(more: str, name: str) -> None:
    words = FLAGS.replace("--train-iters 4", "") if "--train-samples" in more else FLAGS
    plain, other = run_facts(configure(FLAGS.split(), {})), run_facts(configure([*words.split(), *more.split()], {}))
    assert plain.keys() == other.keys() and plain[name] != other[name]


def test_islands_are_facts_beside_the_fingerprint() -> None:
    """A rank that read no cluster file would exchange gradients in other groups than its peers."""
    one = configure(FLAGS.split(), {})
    plain, other = run_facts(one), run_facts(replace(one, plan=replace(one.plan, islands=((0,),))))
    assert {name for name in plain if plain[name] != other[name]} == {"plan islands"}


def test_places_and_names_are_no_facts(tmp_path: Path) -> None:
    a, b = (run_facts(configure([*FLAGS.split(), "--save", str(tmp_path / name)], {})) for name in "ab")
    assert a == b and a["checkpoint.save"] is True


@pytest.mark.parametrize(
    "more",
    [
        "", "--lr 1", "--lr-warmup-iters 2 --lr-decay-style cosine --min-lr 0", "--weight-decay 1",
        "--lr-decay-style WSD --lr-wsd-decay-iters 2", "--lr-decay-style constant --weight-decay 0",
    ],
)  # fmt: skip
def test_a_schedule_that_another_rank_has_told_is_the_same(more: str) -> None:
    """Ranks that joined have it from others, which have their own: 0 is not unlike 0.0."""
    one = configure([*FLAGS.split(), *more.split()], {})
    told = replace(one, schedule=decode(encode(one.schedule), ScheduleConfig, "rank 0"))
    assert check_words(run_facts(one)) == check_words(run_facts(told))


def check_words(facts: Mapping[str, object]) -> dict[str, str]:
    """As ranks compare them."""
    return {name: repr(fact) for name, fact in facts.items()}


def test_data_are_told_apart(tmp_path: Path) -> None:
    text = "".join(f'{{"text": "document {i}, with its words"}}\n' for i in range(50))
    for name, changed in (("a", text), ("b", text), ("c", text.replace("document 7,", "Document 7,")), ("d", text * 2)):
        (tmp_path / f"{name}.jsonl").write_text(changed)

    def marks(name: str, length: int = 512, seed: int = 1) -> str:
        config = DataConfig(data_path=(str(tmp_path / f"{name}.jsonl"),), split="1")
        return build_datasets(config, length, seed, (4, 0, 0), log=lambda _: None).fingerprints["train"]

    assert marks("a") == marks("b") and len(marks("a")) == 16
    assert len({marks("a"), marks("c"), marks("d"), marks("a", 256), marks("a", seed=2)}) == 5
    stream = DataConfig(data_path=(str(tmp_path / "a.jsonl"),), split="1", dataloader_type="streaming")
    assert build_datasets(stream, 32, 1, (4, 0, 0), log=lambda _: None).fingerprints == {"train": "", "valid": ""}


@pytest.mark.parametrize(
    ("own", "says"),
    [  # of an option that decides about exchanges at the start, too
        (("--data-path", "README.md"), "data (train): rank 1 has "),
        (("--save-interval", "0"), "checkpoint.save_interval: rank 1 has 0, rank 0 has None"),
        pytest.param(("--clip-grad", "0.5"), "optimizer.clip_grad: rank 1 has 0.5, rank 0 has", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_refuse_together(own: tuple[str, ...], says: str, tmp_path: Path) -> None:
    flags = ("--data-path", "docs/index.md", "--split", "1", "--eval-iters", "0")
    ranks = start(tmp_path, TWO_REPLICAS, 2, *flags, own={1: own})
    try:
        for process in ranks:
            _, err = process.communicate(timeout=90)
            assert process.returncode == 2 and says in err and "Traceback" not in err, err
    finally:
        for process in ranks:
            process.kill()
            process.wait()
