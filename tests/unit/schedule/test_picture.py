"""Pictures of schedules, and the command that makes them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.schedule import Costs, generate, lower, simulate
from hetero_megatron.schedule.picture import COLOURS, Picture, svg

SVG = "{http://www.w3.org/2000/svg}"


def picture(title: str, name: str = "1f1b") -> Picture:
    return Picture(title, simulate(lower(generate(name, 3, 4)), Costs([1, 1, 1], [2, 2, 2], [0.5, 0.5])))


def test_every_action_is_a_rectangle_inside_the_page() -> None:
    root = ET.fromstring(svg([picture("a < b & c"), picture("gpipe", "gpipe")]))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    rectangles = [r for r in root.iter(f"{SVG}rect") if r.get("fill") and float(r.attrib["height"]) > 12]
    for kind in ("F", "B"):
        assert sum(r.get("fill") == COLOURS[kind] for r in rectangles) == 2 * 3 * 4
    for r in rectangles:
        assert float(r.attrib["x"]) >= 0 and float(r.attrib["x"]) + float(r.attrib["width"]) <= width
        assert float(r.attrib["y"]) + float(r.attrib["height"]) <= height
    assert any((t.text or "").startswith("a < b & c: ") for t in root.iter(f"{SVG}text"))


def test_nothing_overlaps_on_a_stage() -> None:
    root = ET.fromstring(svg([picture("x")]))
    rows: dict[str, list[tuple[float, float]]] = {}
    for r in root.iter(f"{SVG}rect"):
        if r.get("fill") and float(r.attrib["height"]) > 12:
            rows.setdefault(r.attrib["y"], []).append((float(r.attrib["x"]), float(r.attrib["width"])))
    assert len(rows) == 3
    for spans in rows.values():
        spans.sort()
        assert all(x + w <= after for (x, w), (after, _) in zip(spans, spans[1:], strict=False))


def test_an_empty_step_has_a_picture() -> None:
    empty = Picture("empty", simulate(lower(generate("1f1b", 2, 0)), Costs([1, 1], [2, 2])))
    assert empty.bubble == 0.0
    ET.fromstring(svg([empty]))


def test_the_command_compares_all_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "schedule",
        "--stages",
        "3",
        "--micro-batches",
        "6",
        "--forward",
        "1",
        "0.5",
        "1",
        "--link",
        "0.2",
        "--in-flight",
        "3",
        "2",
        "1",
    ]
    assert main([*words, "--json", "--out", str(tmp_path / "x.svg")]) == 0
    found = {s["name"]: s for s in json.loads(capsys.readouterr().out)["schedules"]}
    assert found["adaptive"]["step_seconds"] <= found["1f1b"]["step_seconds"]
    assert all(a <= b for a, b in zip(found["adaptive"]["in_flight"], found["1f1b"]["in_flight"], strict=True))
    ET.parse(tmp_path / "x.svg")
    assert main([*words, "--schedules", "1f1b"]) == 0
    assert "1f1b" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, named",
    [
        ("--stages 0 --micro-batches 1", "--stages"),
        ("--stages 2 --micro-batches -1", "--micro-batches"),
        ("--stages 2 --micro-batches 1000000000", "--micro-batches"),
        ("--stages 2 --micro-batches 2 --forward 1 2 3", "--forward"),
        ("--stages 2 --micro-batches 2 --forward nan", "--forward = nan"),
        ("--stages 2 --micro-batches 2 --in-flight 0", "--in-flight = 0"),
        ("--stages 2 --micro-batches 2 --schedules 2f2b", "schedule"),
        ("--stages 2 --micro-batches 2 --effort -1", "effort"),
    ],
)
def test_bad_flags_are_refused(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *words.split()]) == 2
    assert named in capsys.readouterr().err
