"""The test split: evaluated once, at the end, on its own documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import inside

RUN = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --vocab-size 257 --seq-length 16 --micro-batch-size 2 --lr 1e-3 --eval-iters 2
    --tokenizer-type ByteTokenizer --log-interval 1
"""



def records(folder: Path, key: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def corpus(path: Path, numbers: range) -> str:
    path.write_text("".join(json.dumps({"text": f"document {i} " + "x" * (i * 7 % 40)}) + "\n" for i in numbers))
    return str(path)


def test_its_loss_is_that_of_its_documents(tmp_path: Path) -> None:
    whole, last = corpus(tmp_path / "all.jsonl", range(50)), corpus(tmp_path / "last.jsonl", range(40, 50))
    run = tmp_path / "run"
    words = [*RUN.split(), "--train-iters", "4", "--eval-interval", "2", "--save", str(run)]
    out, _ = inside([*words, "--data-path", whole, "--split", "60,20,20"])
    (test,) = records(run, "test_loss")
    assert test["step"] == 4 and "on test set" in out and [r["step"] for r in records(run, "validation_loss")] == [2, 4]
    again = tmp_path / "again"
    words = [*RUN.split(), "--skip-train", "--train-iters", "4", "--load", str(run), "--save", str(again)]
    inside([*words, "--train-data-path", whole, "--valid-data-path", last])
    (same,) = records(again, "validation_loss")
    assert same["validation_loss"] == pytest.approx(test["test_loss"], rel=1e-6) and not records(again, "test_loss")


def test_without_documents_for_it_nothing_is_tested(tmp_path: Path) -> None:
    """By default split (which leaves 40 documents none), or without a share; a share that is asked for is refused."""
    few = corpus(tmp_path / "few.jsonl", range(40))
    for name, split in {"default": (), "no share": ("--split", "90,10,0")}.items():
        words = [*RUN.split(), "--train-iters", "1", "--eval-interval", "1", "--save", str(tmp_path / name)]
        inside([*words, "--data-path", few, *split])
        assert records(tmp_path / name, "validation_loss") and not records(tmp_path / name, "test_loss")
    words = [*RUN.split(), "--train-iters", "1", "--eval-interval", "1", "--data-path", few, "--split", "900,99,1"]
    assert "--split = 900,99,1: leaves no document" in inside(words, code=2)[1]
