"""`hetero-megatron report`, drift and fits on logs that were altered: a page, or a refusal that says where; and what a
page or a refusal shows of names that others chose."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.run_page import read_run, run_page, summary
from hetero_megatron.monitoring.stragglers import read_diagnoses, read_drift, take_joined
from hetero_megatron.predictor.measured_runs import median_step_seconds
from hetero_megatron.training.alignment.drift import loss_drift
from tests.unit.training.test_report import Page, run_dir  # noqa: F401 (a fixture)

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3.5, 2**53 + 1, 10**31, -(10**31), 1e308, -1e308, 5e-324, float("nan"), float("inf"),
    "", "x", "0-3", "9-0", "0-999999999", "\x1b[31mred", "<!--<script>", "é" * 500, [], [[]], [1, "a", None], {},
    {"": {}}, {"a": [{}]}, ["F", 0, 0, 0], [0, 1],
]  # fmt: skip
FILES = ("metrics.jsonl", "events.jsonl", "metrics.replaced.jsonl")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def altered(text: str, dice: random.Random) -> bytes:
    """A file of JSON lines with something changed: a field, a key, some bytes, or lines."""
    lines = text.splitlines()
    index = dice.randrange(len(lines))
    how = dice.choice(["value", "value", "value", "value", "remove", "key", "bytes", "cut", "swap", "digits", "deep"])
    value = copy.deepcopy(json.loads(lines[index]))
    container, key = dice.choice(list(places(value)))
    if how == "value":
        container[key] = dice.choice(ODD)
    elif how in ("remove", "key"):
        old = container.pop(key)
        if how == "key" and isinstance(container, dict):
            container[dice.choice(["\x1b[2J", "<!--<script>", "9" * 30, "step"])] = old
    lines[index] = json.dumps(value)
    if how == "digits":
        lines[index] = re.sub(r"\d+", "7" * 5000, lines[index], count=1)
    elif how == "deep":
        lines[index] = '{"step": ' + "[" * 5000 + "]" * 5000 + "}"
    elif how == "swap":
        dice.shuffle(lines)
    content = ("\n".join(lines) + "\n").encode()
    if how == "bytes":
        at = dice.randrange(len(content))
        content = content[:at] + dice.randbytes(3) + content[at + 3 :]
    return content[: dice.randrange(len(content))] if how == "cut" else content


@pytest.mark.slow
def test_altered_logs_are_shown_or_refused_with_their_place(run_dir: Path) -> None:  # noqa: F811
    good = {name: (run_dir / name).read_text() for name in FILES}
    shown = 0
    for seed in range(250):
        dice = random.Random(seed)
        name = dice.choice(FILES)
        (run_dir / name).write_bytes(altered(good[name], dice))
        try:
            run = read_run(str(run_dir))
            text = run_page(run)
            json.dumps(summary(run), allow_nan=False)
            page = Page()
            page.feed(text)
            assert page.open == [] and text.count("<script>") <= 1 and "<!--" not in text, seed
            shown += 1
        except UserError as error:
            assert ".jsonl" in str(error) and "\x1b" not in str(error), (seed, str(error))
        for read in (lambda: loss_drift(run_dir, run_dir, 0.1), lambda: median_step_seconds(run_dir / FILES[0])):
            try:
                read()
            except UserError as error:
                assert "metrics" in str(error) or "seconds" in str(error), (seed, str(error))
        (run_dir / name).write_text(good[name])
    assert 25 < shown < 225, shown


def test_names_cannot_break_the_page(run_dir: Path) -> None:  # noqa: F811
    good = {file: (run_dir / file).read_text() for file in FILES}
    for name in ("<!--<script>", "</script><script>alert(1)//", "'><img src=x onerror=y>", "]]>"):
        for file, text in good.items():
            (run_dir / file).write_text(text.replace('"big"', json.dumps(name)))
        found = run_page(read_run(str(run_dir)))
        page = Page()
        page.feed(found)
        assert page.open == [] and found.count("<script>") == 1 and "<!--" not in found and "<img" not in found
        data = re.search(r"const DATA = (\{.*?\});\n", found)
        assert data is not None
        labels = [label for chart in json.loads(data[1])["charts"] for label in chart["labels"]]
        assert any(name in label for label in labels), "the name is all there"


def test_what_steers_a_terminal_is_spelled_out_and_long_names_are_cut(tmp_path: Path, capsys: Any) -> None:
    name = "\x1b[2J\x9b31m\u202e\x07" + "k" * 10_000
    for value in (name, {name: 1}):
        line = {"step": 1, "loss": 1.0, "step_seconds": 1.0, "tokens": 1, "tgs_per_chip": {name: value}}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        assert main(["report", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert said.rstrip("\n").isprintable() and "\\x1b[2J" in said and len(said) < 1000
    assert str(UserError("a\x1bb", field="\x00", value="\x7f", accepted="\r", where="\u2028")).isprintable()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"ratios": []}', '{"step": 1, "dtype": 3, "ratios": {"x": 1}}'])
def test_what_ranks_leave_for_the_launcher_is_checked(content: str, tmp_path: Path) -> None:
    (tmp_path / "drift.json").write_text(content)
    with pytest.raises(UserError, match="drift.json"):
        read_drift(tmp_path)
    assert read_drift(tmp_path) is None, "the next round is not refused for it"
    (tmp_path / "rank-1.json").write_text(content)
    (tmp_path / "joined-x").touch()
    assert read_diagnoses(tmp_path) == [] and take_joined(tmp_path) == set()
