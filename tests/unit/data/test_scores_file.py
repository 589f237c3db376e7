"""Files of scores that others wrote: what does not fit is one sentence, whatever the bytes are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.data.sample import Sample
from hetero_megatron.data.scored import KIND, ScoredDataset, check_scores, order_of
from hetero_megatron.data.scores_file import MAGIC, ScoresFile, create_scores, open_scores
from hetero_megatron.errors import UserError
from hetero_megatron.training.lr_schedule import BatchSize
from hetero_megatron.training.reference import KIND as ANSWERS
from hetero_megatron.training.reference import _read

LENGTH, TOP, VOCAB = 3, 2, 7


class Rows:
    def __getitem__(self, index: int) -> Sample:
        return Sample(np.full(LENGTH + 1, index), np.zeros(1, np.int32))


def write(path: Path, samples: int = 4, **more: Any) -> ScoresFile:
    """A file in order; ``more``: values of arrays in place of those of a uniform teacher."""
    shapes: dict[str, tuple[str, list[int]]] = {
        "train.ids": ("<i4", [samples, LENGTH, TOP]), "train.logps": ("<f4", [samples, LENGTH, TOP]),
        "train.rest": ("<f4", [samples, LENGTH]),
    }  # fmt: skip
    file = create_scores(str(path), "f", {"kind": KIND, "made_for": {"order of train": order_of(Rows(), samples)},
                                          "temperature": 1.0}, shapes)  # fmt: skip
    values = {"ids": [0, VOCAB - 1], "logps": -np.log(VOCAB), "rest": np.log((VOCAB - TOP) / VOCAB)} | more
    for name, value in values.items():
        file.arrays[f"train.{name}"][:] = value
    file.complete()
    return open_scores(str(path), "f", KIND)


def with_header(path: Path, arrays: Any) -> None:
    text = json.dumps({"kind": KIND, "made_for": {}, "arrays": arrays}).encode()
    path.write_bytes(MAGIC + len(text).to_bytes(8, "little") + text + bytes(200))


@pytest.mark.parametrize(
    "arrays",
    [[], 3, None, {"a": 1}, {"a": ["<i4", [1]]}, {"a": ["<O8", [1], 0]}, {"a": ["<i4", [1 << 62, 8], 0]},
     {"a": ["<i4", [-1], 0]}, {"a": ["<i4", [0, 10**30], 0]}, {"a": ["<i4", [1] * 99, 0]}, {"a": ["<i4", "12", 0]},
     {"a": ["<i4", [1], 1 << 70]}, {"a": ["<i4", [True], 0]}, {"a": [["<i4"], [1], 0]}],
)  # fmt: skip
def test_headers_that_lie(arrays: Any, tmp_path: Path) -> None:
    with_header(path := tmp_path / "file", arrays)
    with pytest.raises(UserError, match="is no file of likeliest tokens"):
        open_scores(str(path), "f", KIND)


def test_bytes_that_are_no_file_of_scores(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")
    content = Path(whole.path).read_bytes()
    for cut in (0, 7, 12, 40, len(content) - 30):
        (tmp_path / "cut").write_bytes(content[:cut])
        with pytest.raises(UserError):
            open_scores(str(tmp_path / "cut"), "f", KIND)
    (tmp_path / "long").write_bytes(MAGIC + b"\xff" * 8)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    for name in ("long", "pipe", ".", "nothing"):
        with pytest.raises(UserError):
            open_scores(str(tmp_path / name), "f", KIND)


@pytest.mark.parametrize(
    ("more", "says"),
    [({"ids": [-1, 2]}, "token -1"), ({"ids": [1, VOCAB]}, f"token {VOCAB}"), ({"rest": np.nan}, "do not add up"),
     ({"logps": np.nan}, "do not add up"), ({"logps": 100.0}, "do not add up"), ({"logps": -np.inf}, "do not add up")],
)  # fmt: skip
def test_what_is_no_distribution_is_refused_where_it_is_read(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    data = ScoredDataset(Rows(), write(tmp_path / "file", **more), "train", VOCAB, "--teacher-scores")
    with pytest.raises(UserError, match=says):
        data[0]


def test_samples_order_and_shapes(tmp_path: Path) -> None:
    file = write(tmp_path / "file")
    data = ScoredDataset(Rows(), file, "train", VOCAB, "f")
    said = data[3].teacher
    assert said is not None and said.ids.shape == (LENGTH, TOP)
    with pytest.raises(UserError, match="holds 4 samples of train, not number 4"):
        data[4]
    for samples in range(1, 5):  # a run may read fewer
        check_scores(file, "f", {}, {"train": (order_of(Rows(), samples), samples)}, LENGTH, 1.0)
    for asked, says in (
        (("0" * 8, 1), "another order of train"), ((order_of(Rows(), 9), 5), "holds 4 samples of train"),
        ((order_of(Rows(), 4) + "0" * 8, 4), "another order of train"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            check_scores(file, "f", {}, {"train": asked}, LENGTH, 1.0)
    with pytest.raises(UserError, match="other shapes or types"):
        check_scores(file, "f", {}, {"train": (order_of(Rows(), 1), 1)}, LENGTH + 1, 1.0)


@pytest.mark.parametrize(
    ("numbers", "logps"), [([1, 1], 0.0), ([2, 1], 0.0), ([-1, 1], 0.0), ([0, 1], np.nan), ([0, 0], 0.0)]
)
def test_damaged_answers(numbers: list[int], logps: float, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    shapes = {"numbers": ("<i8", [2]), "logps": ("<f8", [2, 2])}
    file = create_scores(path, "f", {"kind": ANSWERS, "made_for": {}}, shapes)
    file.arrays["numbers"][:], file.arrays["logps"][:] = numbers, logps
    file.complete()
    with pytest.raises(UserError, match="is damaged"):
        _read(path, {})


def test_nothing_is_left_of_a_file_that_was_given_up(tmp_path: Path) -> None:
    file = create_scores(str(tmp_path / "file"), "f", {}, {"a": ("<i4", [5])})
    file.give_up()
    assert not list(tmp_path.iterdir())


def test_samples_after_some_steps_from_anywhere() -> None:
    for batch in (BatchSize(8), BatchSize(8, 2, 2, 30), BatchSize(6, 1, 5, 7)):
        for begin in range(40):
            consumed = begin
            for steps in range(12):
                assert batch.samples_after(steps, begin) == consumed
                consumed += batch.at(consumed)
