"""`hetero-megatron report`: what is on the page, that it is one file, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.main import main
from hetero_megatron.html.pictures import nice_ticks
from hetero_megatron.monitoring import metrics, record, run_files
from hetero_megatron.monitoring.run_page import measured_chart, read_run, run_page, summary
from hetero_megatron.monitoring.run_pictures import plan_picture
from hetero_megatron.spec.preference import Preference
from hetero_megatron.training.config import RoleConfig, RunConfig
from hetero_megatron.training.elastic_state import ElasticState, Phases

WORDS = "--plan examples/plans/demo.yaml --cluster examples/clusters/testbed.yaml --model tiny --mock-data --lr 1e-3"
STEPS = 12
VOID = {"meta", "line", "rect", "circle", "polyline", "br"}


def config(directory: Path) -> RunConfig:
    return configure([*WORDS.split(), "--train-iters", str(STEPS), "--save", str(directory)], {"WORLD_SIZE": "4"})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 12 steps with a NaN, a straggler, a restart after step 6 and a timeline."""
    run = config(tmp_path)
    found, notice = record.expectation(run)
    assert found is not None and "data sheets" in notice
    busy = record.expected_busy(run)
    assert [busy[r] / found.busy[r] < 0.99 for r in run.plan.ranks] == [True, True, False, False], "exchanges of TP"
    chips = {r: run.cluster.chip_of(r).name for r in run.plan.ranks}  # type: ignore[union-attr]
    writer = metrics.MetricsWriter(str(tmp_path))
    record.add_event(tmp_path, "start", "start at step 1", **record.start_event(run, found, busy, chips, 1))
    rows = {str(r): [("F", 0.0, 0.2, 0), ("B", 0.25, 0.4, 0)] for r in run.plan.ranks}
    record.add_event(tmp_path, "timeline", "timeline of step 3", step=3, seconds=1.0, ranks=rows)
    for count, step in enumerate([*range(1, 9), *range(7, STEPS + 1)], 1):  # steps 7 and 8 are run twice
        loss = float("nan") if step == 5 else 5.0 - 0.1 * step
        writer.step(
            metrics.StepMetrics(
                step, 16 * step, loss, 1.0, 1e-3, 4096, 2.0, found.step_seconds, batch_size=16,
                busy_seconds=[1.0, 1.1, 1.2, 1.3], bubble_seconds=[0.5] * 4, communication_seconds=[0.1] * 4,
                tgs_per_chip={"big": 700.0, "small": 300.0},
            )
        )  # fmt: skip
        if count == 8:
            record.add_event(tmp_path, "launcher", "rank 2 <slow-0> ended with SIGKILL")
            writer.close()
            writer = metrics.MetricsWriter(str(tmp_path), resumed=metrics.Resumed(6))
            record.add_event(tmp_path, "start", "again", **record.start_event(run, found, busy, chips, 7))
    writer.validation(12, 3.5)
    record.add_event(tmp_path, "straggler", "rank 3 (small) falls behind", step=9, rank=3, ratio=2.0)
    record.add_event(tmp_path, "end", "done: 12 steps", step=12)
    return tmp_path


class Page(HTMLParser):
    """Checks that what is opened is closed, in order; collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page must need nothing but itself"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:  # a line with a title in it is closed
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_the_page_says_what_happened(run_dir: Path) -> None:
    assert main(["report", str(run_dir)]) == 0
    text = (run_dir / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and "http" not in text and text.count("<script>") == 1
    for words in (
        "tiny in", "ranks 0-1, layers 0-3", "tp 2", "GiB", "2; 2 steps were run again",
        "rank 2 <slow-0> ended with SIGKILL",
        "rank 3 (small) falls behind", "predicted: pipeline 0", "measured: step 3, 1 s", "validation", "done: 12 steps",
    ):  # fmt: skip
        assert words in page.text or words in text, words
    losses = re.findall(r"<polyline points='([^']*)'", text)[:2]
    assert [len(points.split()) for points in losses] == [4, 7], "step 5 is not finite: the curve is interrupted"


def test_figures(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not (run_dir / "report.html").exists()
    assert (found["steps"], found["repeated_steps"], found["starts"], found["stragglers"]) == (12, 2, 2, 1)
    assert found["first_loss"] == pytest.approx(4.9) and found["last_loss"] == pytest.approx(3.8)
    assert found["step_seconds"] == 2.0 and found["tgs_per_chip"] == {"big": 700.0, "small": 300.0}
    predicted = found["predicted_step_seconds"]
    assert found["measured_over_predicted"] == pytest.approx(2.0 / predicted) and found["ended"] == "done: 12 steps"


def test_what_was_emulated_is_named_and_its_flags_stay(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_page(read_run(str(run_dir)))
    assert summary(read_run(str(run_dir)))["emulation"] is None and "emulated</td>" not in text
    start = {"chips": "clock", "links": "paced"}
    load = {"foreign_cores": 0.4, "disturbed": True}
    for step, facts in (
        (0, start), (6, {**start, **load, "overrun": 0.034, "late": 0.2, "worst_rank": 1, "invalid": True}),
        (6, start), (12, {**start, "disturbed": False, "overrun": 0.0, "late": 0.1, "worst_rank": 0, "invalid": False}),
    ):  # fmt: skip
        metrics.MetricsWriter(str(run_dir), resumed=metrics.Resumed(12)).emulation(step, facts)
    assert main(["report", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 12 and found["emulation"]["chips"] == "clock"
    assert found["emulation"]["invalid"] and found["emulation"]["disturbed"], "of the first part of the run"
    text = run_page(read_run(str(run_dir)))
    for words in (
        "chips clock (emulated clock: errors are schedule + communication errors), links paced", "up to 10.00%",
        "of it (schedule + communication error)", "INVALID: a rank could not keep up", "DISTURBED: foreign load 0.40",
    ):  # fmt: skip
        assert words in text, words


def test_the_script_parses(run_dir: Path, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    script = re.search(r"<script>(.*)</script>", run_page(read_run(str(run_dir))), re.DOTALL)
    assert script is not None
    (tmp_path / "page.js").write_text(script[1])
    done = subprocess.run([node, "--check", str(tmp_path / "page.js")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_without_events_or_prediction_has_a_page(tmp_path: Path) -> None:
    writer = metrics.MetricsWriter(str(tmp_path))
    writer.step(metrics.StepMetrics(1, 4, float("nan"), 1.0, 1e-3, 100, 0.5))
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 2, "loss"')  # cut off, as by a kill
    run = read_run(str(tmp_path))
    assert summary(run)["predicted_step_seconds"] is None and summary(run)["first_loss"] is None
    page = Page()
    page.feed(run_page(run))
    assert page.open == [] and "neither a prediction nor a timeline" in page.text


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "no such directory"),
        ({}, "holds no metrics.jsonl"),
        ({"metrics.jsonl": ""}, "holds no step yet"),
        ({"metrics.jsonl": "nonsense\n{}\n"}, "metrics.jsonl:1: not valid JSON"),
        ({"metrics.jsonl": "[1]\n"}, "metrics.jsonl:1: not a JSON object"),
        ({"metrics.jsonl": '{"step": 1}\n'}, "metrics.jsonl:1: loss: is missing"),
        ({"metrics.jsonl": '{"step": "x", "loss": 1}\n'}, "step = x: is not what a line of metrics holds"),
        (
            {"metrics.jsonl": '{"step": 1, "loss": 1, "step_seconds": 1, "tokens": 1}\n', "events.jsonl": '{"a": 1}\n'},
            "events.jsonl:1: kind = None: is not an event",
        ),
    ],
)
def test_refusals(files: dict[str, str] | None, says: str, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path if files is not None else tmp_path / "nowhere"
    for name, content in (files or {}).items():
        (tmp_path / name).write_text(content)
    assert main(["report", str(target)]) == 2
    assert says in capsys.readouterr().err


def test_flags_are_checked(run_dir: Path, capsys: Any) -> None:
    assert main(["report"]) == 2 and main(["report", str(run_dir), "--pdf"]) == 2
    assert main(["report", str(run_dir), "--out", str(run_dir / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_ticks_are_round_and_enclose() -> None:
    for low, high in ((0.0, 1.0), (3.21, 3.22), (-5.0, 1e6), (2.0, 2.0), (1e-9, 3e-9)):
        ticks = nice_ticks(low, high)
        assert 2 <= len(ticks) <= 8 and ticks[0] <= low and ticks[-1] >= high


def test_a_measured_step_is_whole(run_dir: Path) -> None:
    run = read_run(str(run_dir))
    event = run.last("timeline")
    assert event is not None
    chart = measured_chart(event, run.last("start"))
    assert chart["labels"][0] == "rank 0, big" and len(chart["rows"]) == 4
    assert all(sum(s[2] for s in row) == pytest.approx(0.95) for row in chart["rows"])  # 0.05 s between F and B
    picture = plan_picture(run.last("start"))  # type: ignore[arg-type]
    assert picture.count("class='stage'") == 3


def test_forwards_before_a_step_are_in_its_prediction(tmp_path: Path) -> None:
    """A teacher like the student takes as long as a reference, and makes the loss longer; KTO with adapters runs three
    forwards."""
    run = config(tmp_path)
    found: dict[str, tuple[float, dict[int, float]]] = {}
    for name, more in (
        ("alone", {}), ("teacher", {"role": RoleConfig("teacher", "", run.spec)}),
        ("dpo", {"preference": Preference(in_step=True)}), ("kto", {"preference": Preference("kto", in_step=True)}),
    ):  # fmt: skip
        made = replace(run, **more)  # type: ignore[arg-type]
        prediction, _ = record.expectation(made)
        assert prediction is not None
        found[name] = prediction.step_seconds, record.expected_busy(made)
    (alone, busy), (beside, busy_beside), (dpo, busy_dpo), (kto, _) = found.values()
    assert beside > dpo > alone and all(busy_beside[r] >= busy_dpo[r] for r in busy)
    assert kto - alone == pytest.approx(3 * (dpo - alone)) and all(busy_beside[r] > busy[r] for r in busy)


def test_an_elastic_run_has_its_changes_on_the_page(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written by the code that a run writes it with."""
    optimizer = SimpleNamespace(inner=None, updates=0)
    for epoch, (step, done) in enumerate([(3, 4), (12, 12)], 1):  # the second has no step to do
        reporter = SimpleNamespace(say=print, event=partial(record.add_event, run_dir))
        training = SimpleNamespace(step=done, runtime=SimpleNamespace(optimizer=optimizer), reporter=reporter)
        seconds = {"notice": 0.5, "groups": 0.25, "move": 1.0}
        phases = Phases(f"epoch {epoch}: lost rank 2 <node>", step, seconds, 4_600_000)
        ElasticState(training, None, None, "node", None, phases).tell()  # type: ignore[arg-type]
    run = read_run(str(run_dir))
    events = [event for event in run.events if event["kind"] == "elastic"]
    assert [(event["step"], "first step" in event["seconds"]) for event in events] == [(3, True), (12, False)]
    page = Page()
    text = run_page(run)
    page.feed(text)
    assert page.open == [] and "Changes of ranks" in page.text and "4.6 MB moved" in page.text
    assert text.count("move: 1 s") == 2 and text.count("first step: ") == 1 and "after step 12" in page.text
    assert main(["top", str(run_dir)]) == 0
    assert "epoch 2: lost rank 2 <node>" in capsys.readouterr().out.split("done: 12 steps")[1]


def test_every_kind_of_event_is_known_to_the_reader() -> None:
    """Which kinds are written, the type checker sees."""
    assert set(run_files.EVENTS) == set(get_args(record.EventKind))
