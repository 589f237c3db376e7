"""A stream is opened by one rank of each node, and the losses are those of a run alone, also after stops and under
other plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.distributed.training.test_end_to_end import ASYMMETRIC
from tests.support.chat import TEMPLATES, chat_tokenizer, turns
from tests.support.programs import SINGLE, inside, start_ranks
from tests.support.selection import quick

OPENS = "TEST_OPENS"  # a folder: each rank that opens a file of data makes a file of its own there
# 2 + 2 + 4 + 6 samples in four steps.
FLAGS = "--fp64 --seed 7 --train-samples 14 --rampup-batch-size 2 2 6 --eval-interval 2 --eval-iters 1 --lr 1e-3"
TWO_STAGES = """
version: 1
seq_length: 48
global_batch_size: 6
pipelines:
  - micro_batch_size: 2
    num_micro_batches: 3
    stages:
      - {ranks: 0, layers: [0, 3]}
      - {ranks: 1, layers: [3, 6]}
"""
FOUR_STAGES = """
version: 1
seq_length: 48
global_batch_size: 6
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 6
    stages:
      - {ranks: 0, layers: [0, 2]}
      - {ranks: 2, layers: [2, 4]}
      - {ranks: 1, layers: [4, 5]}
      - {ranks: 3, layers: [5, 6]}
"""


def note_opens() -> None:
    """From now on this process notes in the folder ``OPENS`` that it opens a file of data."""
    folder, rank = os.environ[OPENS], os.environ["RANK"]

    def hook(event: str, values: tuple[object, ...]) -> None:
        if event == "open" and str(values[0]).endswith(".jsonl") and "data_" in str(values[0]):
            os.mkdir(f"{folder}/{rank}-{len(os.listdir(folder))}")

    sys.addaudithook(hook)


def text(folder: Path) -> str:
    for name, first in (("data_train", 0), ("data_valid", 500)):
        lines = [json.dumps({"text": f"{i} " + "fox " * (i * i % 41)}) for i in range(first, first + 90)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return "--model tiny --eod-mask-loss --reset-attention-mask --reset-position-ids"


def conversations(folder: Path) -> str:
    for name, first in (("data_train", 0), ("data_valid", 500)):
        chats = [turns("q " * (i % 7 + 1), f"{i} " + "fox " * (i % 5)) for i in range(first, first + 40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    tokenizer = chat_tokenizer(folder / "tokenizer", TEMPLATES["chatml"])
    model = "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 48"
    return f"--sft {model} --vocab-size 400 --seq-length 48 --tokenizer-model {tokenizer} --shuffle-buffer 8"


def flags(folder: Path) -> str:
    paths = f"--train-data-path {folder}/data_train.jsonl --valid-data-path {folder}/data_valid.jsonl"
    return f"{paths} {FLAGS} --dataloader-type streaming"


def run(folder: Path, name: str, plan: str, more: str, nodes: Sequence[str] = ()) -> tuple[str, list[int]]:
    """(what it printed, the ranks that opened files of data)."""
    (folder / f"{name}.yaml").write_text(plan)
    words = f"{more} {flags(folder)} --plan {folder}/{name}.yaml".split()
    if not nodes:
        return inside(words)[0], []
    opened = folder / f"{name}-opens"
    opened.mkdir()
    ranks = start_ranks(len(nodes), words, nodes=nodes, before=note_opens, **{OPENS: str(opened)})
    try:
        printed = [rank.communicate(240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(nodes), printed
    return "".join(out for out, _ in printed), sorted({int(o.name.partition("-")[0]) for o in opened.iterdir()})


def curve(folder: Path, key: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in rows if key in row}


def check_curves(whole: Path, parts: Path) -> None:
    for key in ("loss", "grad_norm", "tokens", "validation_loss"):
        wanted = curve(whole, key)
        assert wanted and curve(parts, key) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.slow
def test_a_rank_asks_the_one_that_reads(tmp_path: Path) -> None:
    words = text(tmp_path)
    run(tmp_path, "alone", SINGLE, f"{words} --save {tmp_path}/alone")
    _, opened = run(tmp_path, "pair", TWO_STAGES, f"{words} --save {tmp_path}/pair", "aa")
    assert opened == [0]
    check_curves(tmp_path / "alone", tmp_path / "pair")


@pytest.mark.parametrize("kind", quick([text, conversations], [], [conversations]))
def test_one_rank_of_each_node_reads_under_any_plan(kind: Callable[[Path], str], tmp_path: Path) -> None:
    words = kind(tmp_path)
    run(tmp_path, "whole", SINGLE, f"{words} --save {tmp_path}/whole")
    saved = f"{words} --save {tmp_path}/parts --load {tmp_path}/parts"
    out, opened = run(tmp_path, "first", ASYMMETRIC, f"{saved} --exit-interval 2", "aabb")
    assert opened == [0, 2] and "stopped at step 2" in out and "ranks 0,2 read" in out
    out, opened = run(tmp_path, "rest", FOUR_STAGES, saved, "abbb")
    assert opened == [0, 1] and "another plan" in out
    check_curves(tmp_path / "whole", tmp_path / "parts")


def refused(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """What two ranks say on standard error that both refuse."""
    try:
        said = [rank.communicate(240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], said
    return said


def test_data_that_the_reader_refuses_ends_all_ranks_with_its_message(tmp_path: Path) -> None:
    words = text(tmp_path)
    with (tmp_path / "data_valid.jsonl").open("a") as file:
        file.write('{"text": "cut o')
    (tmp_path / "plan.yaml").write_text(TWO_STAGES)
    ranks = start_ranks(2, f"{words} {flags(tmp_path)} --plan {tmp_path}/plan.yaml".split(), nodes="aa")
    said = refused(ranks)
    assert "data_valid.jsonl" in said[0] and "Traceback" not in "".join(said), said


@pytest.mark.parametrize("kind", [text, conversations])
def test_nodes_that_read_unlike_streams_do_not_train_together(kind: Callable[[Path], str], tmp_path: Path) -> None:
    """Of the same size, and unlike in their middle only."""
    words = kind(tmp_path)
    (tmp_path / "plan.yaml").write_text(TWO_STAGES)
    plain = (tmp_path / "data_train.jsonl").read_bytes()
    half = plain.index(b"fox", len(plain) // 2)
    (tmp_path / "other.jsonl").write_bytes(plain[:half] + b"cat" + plain[half + 3 :])
    flags = f"{words} --plan {tmp_path}/plan.yaml --dataloader-type streaming --train-iters 2 --lr 1e-3"
    own = {rank: ["--train-data-path", f"{tmp_path}/{name}.jsonl"] for rank, name in enumerate(("data_train", "other"))}
    ranks = start_ranks(2, flags.split(), own, nodes="ab")
    said = refused(ranks)
    assert "data (train): rank 1 reads " in said[0] and "Traceback" not in "".join(said), said
