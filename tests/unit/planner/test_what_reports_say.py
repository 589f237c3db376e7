"""Reports and pages of plans: what was asked, who holds what, the share of the bound, a roomier plan, labels."""

from __future__ import annotations

import html
import itertools
import json
import re
from pathlib import Path

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.html.page import KIND_COLORS
from hetero_megatron.html.pictures import COLORS, PART_COLORS, contrast, ink
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.report.prediction import holdings
from hetero_megatron.spec import load_model
from tests.support.paths import ROOT

CLUSTER = str(ROOT / "examples" / "clusters" / "mixed_small.yaml")
SIZES = "--seq-length 8192 --global-batch-size 8 --quiet --more-schedules never --context never"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """The text, the page and the cluster file of a search that fills chips."""
    import contextlib
    import io

    folder, said = tmp_path_factory.mktemp("plan"), io.StringIO()
    cluster = f"{Path(CLUSTER).read_text()}\nchips: {{A100-80-SXM: {{memory: 75 GiB}}}}\n"
    (folder / "tight.yaml").write_text(cluster)
    with contextlib.redirect_stdout(said):
        words = f"plan --model llama3-8b --cluster {folder}/tight.yaml {SIZES} --html {folder}/page.html"
        assert main([*words.split(), "--offload", "never"]) == 0
    return said.getvalue(), (folder / "page.html").read_text(), folder / "tight.yaml"


@pytest.mark.slow
def test_what_was_asked_stands_in_text_and_page(written: tuple[str, str, Path]) -> None:
    for text in (written[0], html.unescape(written[1])):
        for words in (
            "llama3-8b: 32 layers, 8.03 billion parameters", "8 sequences of 8,192 tokens = 65,536 tokens", "bf16",
            "all weights; optimizer adam; 6% of each chip's memory stays free", "between ampere and ada 20 GB/s, 10 us",
        ):  # fmt: skip
            assert words in text, words


def test_a_prediction_says_what_it_is_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = f"--model tiny --cluster {CLUSTER} --lora-rank 8 --lora-targets q_proj --quiet --time-limit 1"
    plan = f"plan {words} --seq-length 64 --global-batch-size 4 --fp8-format e4m3 --fp8-recipe tensorwise"
    assert main([*plan.split(), "--no-baselines", "--out", f"{tmp_path}/plan.yaml"]) == 0
    capsys.readouterr()
    predict = ["predict", "--plan", f"{tmp_path}/plan.yaml", "--cluster", CLUSTER]
    assert main([*predict, "--html", f"{tmp_path}/page.html"]) == 0
    for text in (capsys.readouterr().out, html.unescape((tmp_path / "page.html").read_text())):
        assert "adapters, --lora-rank 8 --lora-targets q_proj; optimizer adam" in text
        assert "bf16, and fp8 (e4m3, tensorwise)" in text
    assert main([*predict, "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["asked"]
    assert asked["adapters"] == {"rank": 8, "targets": ["q_proj"]} and asked["global_batch_size"] == 4
    assert {link["a"] for link in asked["links"]} == {"ampere", "ada"}


@pytest.mark.slow
def test_the_share_of_the_bound_is_that_which_the_plan_reaches(written: tuple[str, str, Path]) -> None:
    text, page, _ = written
    rates = [float(x.replace(",", "")) for x in re.findall(r"([\d,]+) tokens/s", text)]
    found = re.search(r"does more than ([\d,]+) tokens/s .*reaches ([\d.]+)% of the bound", text)
    assert found is not None
    reached = rates[0] / float(found[1].replace(",", ""))
    assert float(found[2]) == pytest.approx(100 * reached, abs=0.1)
    assert f"this plan reaches {found[2]}%" in page


@pytest.mark.slow
def test_a_roomier_plan_stands_beside_one_that_fills_a_chip(
    written: tuple[str, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text, page, cluster = written
    said = re.search(r"roomier: .*a step takes ([\d.]+) (m?)s \(\+([\d.]+)%\)", text)
    assert said is not None and "a roomier plan" in page
    best = re.search(r"best plan: ([\d.]+) (m?)s per step", text)
    assert best is not None and float(said[1]) >= float(best[1])
    words = f"plan --model llama3-8b --cluster {cluster} {SIZES} --offload never --memory-margin 0.2 --json"
    assert main([*words.split(), "--no-baselines"]) == 0
    wide = json.loads(capsys.readouterr().out)  # what is advised finds one at least as fast
    assert wide["step_seconds"] <= float(said[1]) * 1.0005


def test_who_holds_what() -> None:
    """Token and head intervals of context groups, unequal shares of TP ranks, sequences of inner replicas."""
    model = load_model("tiny")
    stages = [
        {"ranks": [0, 1, 2], "layers": [0, 2], "context": [
            {"ranks": [0, 1], "tokens": [24, 24], "heads": [6, 2]}, {"ranks": [2], "tokens": [16], "heads": [8]}]},
        {"ranks": [3, 4], "layers": [2, 4], "tp_split": [3, 1]},
        {"ranks": [5, 6], "layers": [4, 5], "tp": 1, "dp_split": [3, 1]},
        {"ranks": [7], "layers": [5, 6]},
    ]  # fmt: skip
    plan = plan_from_dict(
        {"seq_length": 64, "global_batch_size": 4,
         "pipelines": [{"micro_batch_size": 4, "num_micro_batches": 1, "stages": stages}]}, model,
    )  # fmt: skip
    lines = [holdings(plan, stage, model) for stage in plan.pipelines[0].stages]
    units = plan.pipelines[0].stages[0].units
    for line, unit in zip(lines[0], units, strict=True):
        for a, b in unit.tokens:
            assert f"{a}-{b - 1}" in line
        assert f"({sum(b - a for a, b in unit.tokens)} of 64)" in line
    assert [line.rpartition(", ")[2] for line in lines[0]] == ["heads 0-5", "heads 6-7", "all heads"]
    assert lines[1] == ["ranks 3-4: all tokens, heads 0-5 on rank 3, 6-7 on rank 4"]
    assert lines[2] == [
        "rank 5: sequences 0-2 of each micro-batch, all tokens, all heads",
        "rank 6: sequence 3 of each micro-batch, all tokens, all heads",
    ]
    assert lines[3] == []


def test_labels_are_readable_on_every_color() -> None:
    """The text of actions is black or white, by contrast; that of stages is the page's own on a tint of the color."""
    for color in {*KIND_COLORS.values(), *COLORS, *PART_COLORS.values()}:
        assert contrast(ink(color), color) >= 4.5, color
    for steps in itertools.product(range(0, 256, 51), repeat=3):
        color = "#" + "".join(f"{step:02x}" for step in steps)
        assert contrast(ink(color), color) >= 4.5, color
    for background, text in (("#ffffff", "#1f2328"), ("#15181c", "#e4e7ea")):
        for color in COLORS:  # color-mix(in srgb, color 22%, background)
            pairs = [(int(color[i : i + 2], 16), int(background[i : i + 2], 16)) for i in (1, 3, 5)]
            tint = "#" + "".join(f"{round(0.22 * a + 0.78 * b):02x}" for a, b in pairs)
            assert contrast(text, tint) >= 7, (color, background)


@pytest.mark.slow
def test_bars_have_their_labels_beside_them(written: tuple[str, str, Path]) -> None:
    tracks = re.findall(r"<div class='track'>(.*?)</div><b>(.*?)</b>", written[1])
    assert len(tracks) > 4 and not any("<b>" in inside for inside, _ in tracks)
