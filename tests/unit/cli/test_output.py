"""Files that commands write: a name that cannot be written is refused before the work; asking changes nothing."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_megatron.cli import main as cli
from hetero_megatron.cli.main import main
from hetero_megatron.cli.output import NOBODY_READS, check_writable, write_text
from hetero_megatron.cluster import load_cluster
from hetero_megatron.errors import UserError
from tests.support.selection import each

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

    importlib.import_module("hetero_megatron.training.train")  # else it is imported with the patch, and keeps it
    monkeypatch.setattr(target, work)
    launch = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "HETERO_NODE": "fast"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    assert f"{flag} = {MISSING}: cannot be written: No such file or directory" in capsys.readouterr().err


def test_export_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--export", "sailor"]) == 2
    assert "--export = sailor: names no file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--out", ""], ["--html="], ["--out", " "]])
def test_an_unset_variable_is_no_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *words]) == 2
    assert f"{words[0].rstrip('=')} = : is empty (an unset variable?). Accepted: a value" in capsys.readouterr().err


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


def companion(out: Path) -> Path:
    return out.with_name(f"{out.name}.cluster.yaml")


def test_the_cluster_of_an_earlier_plan_does_not_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    words = [*PLAN, "--dtype", "fp32", "--no-baselines", "--quiet", "--out", str(out)]
    assert main([*words, "--add", "1xfast"]) == 0
    assert load_cluster(str(companion(out))).world_size == load_cluster(CLUSTER[1]).world_size + 1
    assert f"ranks refer to {companion(out)}" in capsys.readouterr().err
    assert main(words) == 0 and not companion(out).exists()
    assert f"removed {companion(out)} of an earlier plan" in capsys.readouterr().err
    assert main(words) == 0 and "removed" not in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--add", "1xfast"], ["--context-only"]])
def test_a_file_that_is_not_ours_is_refused_before_the_work(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    companion(out).write_text("version: 1\n")
    for module, name in (("plan", "search"), ("plan_context", "schedule_context")):
        monkeypatch.setattr(f"hetero_megatron.cli.{module}.{name}", lambda *_, **__: pytest.fail("it has begun"))
    assert main([*PLAN, *more, "--out", str(out)]) == 2
    assert f"--out = {companion(out)}: is there and not by this command" in capsys.readouterr().err
    assert companion(out).read_text() == "version: 1\n" and not out.exists()


def test_the_cluster_that_is_read_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan made again on the cluster of the first one, under the same name."""
    out = tmp_path / "plan.yaml"
    companion(out).write_text(Path(CLUSTER[1]).read_text())
    words = ["plan", "--cluster", str(companion(out)), *PLAN[3:], "--dtype", "fp32", "--no-baselines", "--quiet"]
    assert main([*words, "--out", str(out)]) == 0 and companion(out).exists()
    assert main([*words, "--out", str(out), "--add", "1xfast"]) == 2
    assert "is the file of --cluster" in capsys.readouterr().err


NOISE = "[WARNING] accelerator set to CPU"
NOISY = f"""
import json, os, subprocess, sys
from hetero_megatron.cli import main
quiet = main.load_command
def load_command(name):
    print({NOISE!r})
    subprocess.run(["echo", {NOISE!r}])
    os.write(1, b{NOISE!r})
    return quiet(name)
main.load_command = load_command
code = main.main(sys.argv[1:])
print("after")
sys.exit(code)
"""


def test_nothing_is_printed_beside_json(tmp_path: Path) -> None:
    """By libraries, by programs that they start, or around Python's stream; also where the reader ends early."""
    words = ["schedule", "--stages", "2", "--micro-batches", "2", "--json"]
    done = subprocess.run([sys.executable, "-c", NOISY, *words], capture_output=True, text=True)
    answer, after = done.stdout.splitlines()
    assert done.returncode == 0 and json.loads(answer) and after == "after", done
    assert done.stderr.count(NOISE) == 3, done
    line = 'exec "$@" | true; exit ${PIPESTATUS[0]}'
    words = ["bash", "-c", line, "-", sys.executable, "-m", "hetero_megatron", "doctor", "--chips", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode in (0, NOBODY_READS) and not ended.stderr, ended  # read or not: nothing of it is said


@pytest.mark.slow
@each("words", ["hetero_megatron.cli.main report --help", "hetero_megatron report --version", "hetero_megatron top no"])
def test_where_nobody_reads_nothing_is_said(words: str) -> None:
    """However the command is started and ends: by its own return, an exit of argparse, or an error."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run([sys.executable, "-m", *words.split()], stdout=writes, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writes)
    errors = ["error: "] if "top" in words else []
    assert done.returncode in (0, 2, NOBODY_READS) and [line[:7] for line in done.stderr.splitlines()] == errors, done


def test_every_command_prints_json_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is printed while a command is imported."""
    quiet = cli.load_command

    logger = logging.getLogger("of a library that is there already")
    logger.addHandler(handler := logging.StreamHandler(sys.stdout))

    def load_command(name: str) -> object:
        print(NOISE)
        logger.warning("said in a log")
        return quiet(name)

    monkeypatch.setattr(cli, "load_command", load_command)
    context = [*PLAN, "--context-only"]
    for words in (PLAN, context, ["doctor", "--chips"], ["plugins", "list"], ["check", "examples/demo.sh"]):
        assert main([*words, "--json"]) in (0, 1, 2)
        out, err = capsys.readouterr()
        assert NOISE in err and "said in a log" in err and handler.stream is sys.stdout
        assert json.loads(out) if out else "error: " in err, (words, out, err)
    # A program that a command starts may have an answer of its own, on the same standard output.
    for starter in (["launch", "--", "generate", "--json"], ["testbed", "run", "--", "generate", "--json"]):
        assert main(starter) == 2
        assert NOISE in capsys.readouterr().out
    for path in Path(cli.__file__).parent.rglob("*.py"):
        assert "print(json.dumps" not in path.read_text(), f"{path}: print_json says it"
