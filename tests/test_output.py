"""Files that commands write: a name that cannot be written is refused before the work; asking changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.cli.output import check_writable, write_text
from hetero_megatron.errors import UserError

CLUSTER = ["--cluster", "examples/clusters/two_nodes.yaml", "--model", "tiny"]
PLAN = ["plan", *CLUSTER, "--seq-length", "64", "--global-batch-size", "4"]
MISSING = "/nonexistent/file"


@pytest.mark.parametrize(
    "words, flag, target",
    [
        ([*PLAN, "--out", MISSING], "--out", "hetero_megatron.cli.plan.search"),
        ([*PLAN, "--html", MISSING], "--html", "hetero_megatron.cli.plan.search"),
        ([*PLAN, "--export", f"sailor:{MISSING}"], "--export", "hetero_megatron.cli.plan.search"),
        ([*PLAN, "--context-only", "--out", MISSING], "--out", "hetero_megatron.cli.plan_context.schedule_context"),
        (["calibrate", *CLUSTER, "--out", MISSING], "--out", "hetero_megatron.comm.start_comm"),
    ],
)
def test_refused_before_the_work(
    words: list[str], flag: str, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("it has begun")

    monkeypatch.setattr(target, work)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HETERO_NODE", "fast")
    assert main(words) == 2
    assert f"{flag} = {MISSING}: cannot be written: No such file or directory" in capsys.readouterr().err


def test_export_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--export", "sailor"]) == 2
    assert "--export = sailor: names no file" in capsys.readouterr().err


def test_asking_changes_nothing(tmp_path: Path) -> None:
    old, new, pipe = tmp_path / "old", tmp_path / "new", tmp_path / "pipe"
    old.write_text("as it was")
    os.mkfifo(pipe)
    for path in (old, new, pipe):  # a pipe without a reader would block
        check_writable(str(path), "--out")
    check_writable(None, "--out")
    assert old.read_text() == "as it was" and not new.exists()
    with pytest.raises(UserError, match="Is a directory"):
        check_writable(str(tmp_path), "--out")
    with pytest.raises(UserError, match="Is a directory"):
        write_text(tmp_path, "--out", "text")
