"""The line about long work: on terminals only, with the share and the time that is left."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.data.corpus import find_corpus
from hetero_megatron.utils import text
from hetero_megatron.utils.text import AFTER, WorkLine, tracked


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Advances by so many seconds whenever it is asked."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 100.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def lines(out: Terminal) -> list[str]:
    return [part.rstrip() for part in out.getvalue().split("\r") if part.strip()]


def test_share_and_time_left() -> None:
    out = Terminal()
    clock = Clock(1.0)
    assert list(tracked(range(8), "counting", 8, lambda _: 1, False, stream=out, clock=clock)) == list(range(8))
    said = lines(out)
    assert said[0] == "counting: 12% of 8, ETA 7 s" and said[3] == "counting: 50% of 8, ETA 4 s"
    assert said[-1] == "counting: 100% of 8, ETA 0 s"
    assert out.getvalue().endswith("\r") and set(out.getvalue().split("\r")[-2]) == {" "}, "nothing stays"


def test_bytes_and_unknown_totals() -> None:
    out = Terminal()
    with WorkLine("reading", 4 << 30, stream=out, clock=Clock(2.0)) as line:
        line.add(1 << 30)
    with WorkLine("reading", 0, stream=out, clock=Clock(2.0)) as line:
        line.add(3 << 20)
    assert lines(out) == ["reading: 25% of 4 GiB, ETA 6 s", "reading: 3 MiB"]


def test_quiet_where_it_is_no_terminal_or_quick_or_another_rank() -> None:
    log = io.StringIO()
    list(tracked(range(100), "x", 100, lambda _: 1, stream=log, clock=Clock(1.0)))
    quick, other = Terminal(), Terminal()
    list(tracked(range(100), "x", 100, lambda _: 1, stream=quick, clock=Clock(AFTER / 200)))
    list(tracked(range(100), "x", 100, lambda _: 1, stream=other, clock=Clock(1.0), environment={"RANK": "3"}))
    assert log.getvalue() == quick.getvalue() == other.getvalue() == ""


def test_an_error_clears_the_line() -> None:
    out = Terminal()
    try:
        for item in tracked(range(8), "x", 8, lambda _: 1, stream=out, clock=Clock(1.0)):
            if item == 4:
                raise ValueError
    except ValueError:
        pass
    assert "x: 12%" in out.getvalue()


@pytest.mark.parametrize("limit", [[], ["--time-limit", "60"]])
def test_planning_says_how_long_it_takes_on_terminals_only(
    limit: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--cluster", "examples/clusters/two_nodes.yaml", "--model", "tiny", "--seq-length", "64"]
    words += ["--global-batch-size", "8", "--dtype", "fp32", "--no-baselines", *limit]
    assert main(words) == 0
    quiet = capsys.readouterr()
    assert "\r" not in quiet.err and "\r" not in quiet.out
    monkeypatch.setattr(text, "AFTER", 0.0)
    monkeypatch.setattr(text, "EVERY", 0.0)
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    assert main(words) == 0
    shown = lines(out)
    pattern = r"search: \d+% of 60 s, ETA (60|59|5\d)(\.\d)? s" if limit else r"search: [\d.]+ m?s"
    assert sum(re.fullmatch(pattern, line) is not None for line in shown) >= 3
    said = [line for line in out.getvalue().splitlines() if line.strip()]
    assert capsys.readouterr().out and any("s per step" in line for line in said), "what is found is said, too"


def test_bytes_of_a_corpus_that_were_read(tmp_path: Path) -> None:
    sizes = []
    for name, texts in (("a.jsonl", ["one", "two"]), ("b.jsonl", ["three"])):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sizes.append(path.stat().st_size)
    corpus = find_corpus(str(tmp_path))
    read = [corpus.bytes_before(after) for _, after in corpus.documents()]
    assert read == [sizes[0] // 2, sizes[0], sum(sizes)] and corpus.num_bytes() == sum(sizes)
