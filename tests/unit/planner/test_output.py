"""What `hetero-megatron predict` prints and writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_megatron.cli.main import main
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.report.prediction_page import html_page
from hetero_megatron.predictor.report.timeline import format_timeline, perfetto_trace
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.utils.text import format_bytes
from tests.support.planner_cases import MODEL, cluster, plan, stages

WORDS = [
    "predict", "--plan", "examples/plans/two_nodes.yaml", "--cluster", "examples/clusters/two_nodes.yaml",
    "--model", "tiny", "--dtype", "fp32",
]  # fmt: skip


def found(*pipelines: Any, schedule: str = "1f1b"):  # type: ignore[no-untyped-def]
    ranks = {r for _, s in pipelines for stage in s for r in stage["ranks"]}
    spelled = plan(*pipelines, schedule=schedule)
    return predict(plan_from_dict(spelled, MODEL), MODEL, cluster(len(ranks), step_seconds=33.0), "fp32")


def test_timeline_as_text() -> None:
    # F0 B0 F1 B1 of one stage: 11 + 22 + 11 + 22 s and 33 s of update, at one column per 3.3 s.
    text = format_timeline(found((2, stages(11))), 30)
    row = text.splitlines()[-1]
    assert row == "0: 0            |FFFbbbbbbbFFFbbbbbbbuuuuuuuuuu|"


def test_equal_pipelines_are_shown_once() -> None:
    text = format_timeline(found((2, stages(6, 5)), (2, stages(6, 5, first_rank=2)), (1, stages(11, first_rank=4))))
    assert text.count("pipelines 0-1:") == 1 and text.count("pipeline 2:") == 1


def test_trace_holds_every_action_once_and_in_time() -> None:
    prediction = found((3, stages(6, 5)), (3, stages(6, 5, first_rank=2)))
    events = [e for e in perfetto_trace(prediction)["traceEvents"] if e["ph"] == "X"]
    compute = [e for e in events if e["cat"] in ("F", "B")]
    assert sorted(e["name"] for e in compute) == sorted(f"{k}{m}" for k in "FB" for m in range(3) for _ in range(2))
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= prediction.step_seconds * 1e6 * (1 + 1e-9) for e in events)
    assert {e["cat"] for e in events} == {"F", "B", "SEND_F", "SEND_B", "gradients", "parameters"}
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in compute:
        lines.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in lines.values():  # one stage does one thing at a time
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in zip(spans, spans[1:]))


def drawn_colors(page: str) -> dict[str, str]:
    """Of the kinds of actions that the page's charts hold, by name."""
    data = page_data(page)
    spans = (span for chart in data["charts"] for row in chart["rows"] for span in row if span[2])
    return {data["kinds"][kind]: data["colors"][kind] for kind, *_ in spans}


def page_data(page: str) -> Any:
    return json.JSONDecoder().raw_decode(page.split("const DATA = ")[1])[0]


def test_kinds_and_chunks_have_their_own_colors() -> None:
    """Parts of a backward and chunks, in the trace and in the page, whose legend has what is drawn and no more."""
    where = [[[0, 2], [5, 8]], [[2, 5], [8, 11]]]
    chunked = [{"ranks": [r], "layers": layers} for r, layers in enumerate(where)]
    colors: dict[str, set[str]] = {}
    in_pages: dict[str, str] = {}
    for schedule, spelled in (("zero-bubble", stages(6, 5)), ("interleaved", chunked), ("1f1b", stages(6, 5))):
        prediction = found((3, spelled), schedule=schedule)
        for event in perfetto_trace(prediction)["traceEvents"]:
            if event["ph"] == "X" and event["cat"] in ("F", "B", "B_INPUT", "W"):
                colors.setdefault(f"{event['cat']}{'.' in event['name']}", set()).add(event["cname"])
        page = html_page(prediction, "x")
        own = drawn_colors(page)
        legend = page.split("One step on the time axis")[1].split("<canvas")[0]
        assert set(re.findall(r"#\w{6}", legend)) == set(own.values())
        in_pages |= own
    assert all(len(names) == 1 for names in colors.values()) and len(colors) == 6
    assert len(set.union(*colors.values())) == 6
    assert len(set(in_pages.values())) == len(in_pages) >= 6 + 1  # and the optimizer


def test_page_is_self_contained_and_its_script_parses(tmp_path: Path) -> None:
    page = html_page(found((3, stages(6, 5))), "a <b> model")
    assert "a &lt;b&gt; model" in page and "http" not in page and "src=" not in page
    script = page.split("<script>")[1].split("</script>")[0]
    assert len(page_data(page)["charts"][0]["rows"]) == 2
    if node := shutil.which("node"):
        file = tmp_path / "page.js"
        file.write_text(script)
        subprocess.run([node, "--check", str(file)], check=True, timeout=60)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "o.html", tmp_path / "o.json"
    assert main([*WORDS, "--html", str(page), "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "predicted step:" in text and "fits: rank" in text
    assert "assumed: data sheet x default efficiencies for big (emulated: a usual core is assumed), small (" in text
    assert json.loads(trace.read_text())["traceEvents"] and page.read_text().startswith("<!doctype html>")
    assert main([*WORDS, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] and data["step_seconds"] > 0 and [r["rank"] for r in data["ranks"]] == [0, 1]
    assert sum(data["parts"].values()) == pytest.approx(data["step_seconds"])


def test_a_plan_that_does_not_fit_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(Path("examples/clusters/two_nodes.yaml").read_text().replace("1 GiB", "70 MiB"))
    words = [str(small) if "clusters" in w else w for w in WORDS]
    assert main([*words, "--json"]) == 1
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert not data["fits"] and data["over"][0]["rank"] == 1
    assert "rank 1 (small) needs" in err and f"over by {format_bytes(data['over'][0]['bytes'])}" in err


@pytest.mark.parametrize(
    "words, message",
    [
        (["predict"], "--cluster"),
        (["predict", "--cluster", "c.yaml"], "one of the arguments --plan --from is required"),
        ([*WORDS, "--from", "x.toml"], "not allowed with argument --plan"),
        ([*WORDS, "--seq-length", "8"], "--seq-length: the plan file says it"),
        ([*WORDS[:5], *WORDS[7:]], "--model: missing, and the plan names none"),
        ([*WORDS, "--jsn"], "unrecognized arguments: --jsn"),
        ([*WORDS, "--memory-margin", "1"], "--memory-margin = 1: is too large"),
        ([*WORDS, "--html", "/nonexistent/x.html"], "--html = /nonexistent/x.html: cannot be written"),
        ([*WORDS[:-1], "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_bad_command_lines(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_chips_without_the_dtype_are_idle_and_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({
        "version": 1, "links": {"inter_node": {"bandwidth": "25 GB/s"}, "intra_node": {"bandwidth": "100 GB/s"}},
        "nodes": [{"name": "new", "chip": "A100-80-SXM"}, {"name": "old", "chip": "small", "chips_per_node": 3}],
        "chips": {
            "small": {"memory": "8 GiB", "tflops": {"fp32": 10}, "memory_bandwidth": "1 TB/s", "dtypes": ["fp32"]},
        },
    }))  # fmt: skip
    words = ["plan", "--model", "tiny", "--cluster", str(tmp_path / "c.yaml"), "--seq-length", "64"]
    words += ["--global-batch-size", "8", "--dtype", "bf16"]
    assert main(words) == 0
    assert "idle: 3 chips (ranks 1-3): small does not compute in bf16" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["idle_ranks"] == [1, 2, 3]
