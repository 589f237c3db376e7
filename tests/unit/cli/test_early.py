"""What is looked at in the first second: places to write, packages and splits, all in one message; and how files are
written and moved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hetero_megatron.checkpoint.export import check_target, make_work, publish_work
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.early import OUTPUTS, PACKAGES
from hetero_megatron.cli.flags.flag import SUPPORTED
from hetero_megatron.cli.flags.table import ALL
from hetero_megatron.errors import UserError
from hetero_megatron.utils.outputs import try_export, try_file, try_folder, write_text

BASE = "--model tiny --mock-data --seq-length 32 --micro-batch-size 1 --train-iters 2 --lr 1e-3"


def refusals(line: str) -> dict[str, list[str]]:
    """By flag, what the first rank says of a line."""
    try:
        configure(line.split(), {"WORLD_SIZE": "1"}, early=True)
    except UserError as error:
        found: dict[str, list[str]] = {}
        for one in error.several or (error,):
            assert one.field in str(error)
            found.setdefault(one.field, []).append(one.problem)
        assert len(str(error).splitlines()) == 1
        return found
    return {}


def test_all_errors_are_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    line = BASE.replace("--lr 1e-3", "--lr nan").replace("--train-iters 2", "--train-iters -2")
    found = refusals(
        f"{line} --bogus 3 --adam-beta1 2 --adam-beta2 -1 --bf16 --fp16 --wandb-project x --save {tmp_path}/file/x "
        f"--save-hf {tmp_path} --lora-dropout 0.1 --eval-iters 0 --skip-train --fp8-format e4m3"
    )
    assert set(found) == {
        "--lr", "--train-iters", "--bogus", "--adam-beta1", "--adam-beta2", "--fp16", "--wandb-project", "--save",
        "--save-hf", "--lora-dropout", "--skip-train", "--fp8-recipe",
    }  # fmt: skip
    assert not any("missing" in problem for key in ("--lr", "--train-iters") for problem in found[key])


def test_what_depends_on_a_bad_flag_is_not_judged() -> None:
    """No guess about a flag that cannot be read: each of these has one error, its own."""
    for bad in ("--lr x", "--train-iters 0", "--seq-length 1e3", "--global-batch-size -4", "--lr-decay-style odd",
                "--tensor-model-parallel-size x", "--micro-batch-size 0", "--num-workers x"):  # fmt: skip
        flag = bad.split()[0]
        words = f"{BASE} --lr-warmup-iters 1 --min-lr 1e-4 --eval-interval 1 --eval-iters 1 {bad}"
        assert list(refusals(words)) == [flag], bad


def test_every_flag_that_writes_is_tried() -> None:
    words = ("write", "keeps its files", "new directory", "directory of the run", "indices of corpora")
    writing = {
        flag.key for flag in ALL if flag.status == SUPPORTED and flag.type is str and flag.nargs != 0
        and not flag.choices and any(word in flag.help for word in words)
    }  # fmt: skip
    assert writing == set(OUTPUTS)


def test_packages_that_flags_ask_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, (module, name, _) in PACKAGES.items():
        flag, monkey = "--" + key.replace("_", "-"), pytest.MonkeyPatch()
        monkey.setitem(sys.modules, module, None)  # type: ignore[arg-type]
        assert refusals(f"{BASE} {flag} {tmp_path}/x")[flag] == [f"{name} is not installed"]
        monkey.undo()
        fake = ModuleType(module)
        fake.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(module, None)
        monkey.setitem(sys.modules, module, fake)
        assert flag not in refusals(f"{BASE} {flag} {tmp_path}/x")
        monkey.undo()
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "version: 1\nseq_length: 32\nglobal_batch_size: 1\npipelines:\n  - micro_batch_size: 1\n"
        "    num_micro_batches: 1\n    stages: [{ranks: [0], layers: [0, 6], optimizer: {offload: true}}]\n"
    )
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # type: ignore[arg-type]
    words = f"--plan {plan} --model tiny --mock-data --train-iters 2 --lr 1e-3"
    found = refusals(words)
    assert found.get("optimizer.offload") == ["DeepSpeed is not installed"], found


def test_splits_without_documents(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(4)))
    data = BASE.replace("--mock-data", f"--data-path {file}")
    evaluated = f"{data} --eval-interval 1 --eval-iters 1"
    assert "leaves no document" in refusals(f"{evaluated} --split 75,24,1")["--split"][0]
    assert refusals(f"{evaluated} --split 50,25,25") == {}
    assert refusals(f"{data} --split 99,1,0") == {}  # nothing is evaluated
    assert "--data-path" in refusals(data.replace("few", "none"))
    assert "--valid-data-path" in refusals(BASE.replace("--mock-data", f"--train-data-path {file}")
                                           + " --eval-interval 1 --eval-iters 1")  # fmt: skip


def test_streams_and_packages_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, table = tmp_path / "few.jsonl", tmp_path / "rows.parquet"
    file.write_text('{"text": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    table.write_bytes(b"PAR1")
    indexed = [tmp_path / "pair.bin", tmp_path / "pair.idx"]
    for path in indexed:
        path.touch()
    stream = BASE.replace("--mock-data", "--dataloader-type streaming --split 1")
    for words, flag, problem in (
        (f"--data-path {file} {file}", "--dataloader-type", "cannot stream a blend"),
        (f"--data-path 1 {file}", "--dataloader-type", "cannot stream a blend"),
        (f"--data-path {tmp_path}/pair", "--dataloader-type", ".bin/.idx is mapped, not streamed"),
        (f"--data-path {tmp_path}/none.jsonl", "--data-path", "no such file or folder"),
        (f"--sft --data-path {file} {file}", "--data-path", "streams have no known sizes to be mixed by"),
        (f"--data-path {file} --eval-interval 1 --eval-iters 1", "--split", "a stream cannot be split: its length is "
         "not known"),
    ):  # fmt: skip
        found = refusals(f"{stream} {words}")
        assert found.get(flag) == [problem], (words, found)
    assert refusals(f"{stream} --data-path {file}") == {}
    for module, path, words in (
        ("pyarrow", table, ""), ("pyarrow", table, "--dataloader-type streaming"), ("datasets", "hub:a/b", "--sft"),
        ("datasets", "hub:a/b", "--sft --dataloader-type streaming"),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
        found = refusals(f"{BASE.replace('--mock-data', f'--data-path {path}')} --split 1 {words} --bogus 1")
        (said,) = found["--data-path"]
        assert module in said and "--bogus" in found


def test_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    good = {
        try_file: ("new", "file", "link2"), try_folder: ("new/a/b", "full", "link", "link/a"),
        try_export: ("new", "empty", "link", "a/b/c"),
    }  # fmt: skip
    bad = {
        try_file: ("no/such", "full", "file/x", "new/", "x" * 300),
        try_folder: ("file", "file/x", "dangling", "x" * 300),
        try_export: ("file", "full", "dangling", "file/x", "x" * 300),
    }  # fmt: skip
    (tmp_path / "link2").symlink_to(tmp_path / "file")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for attempt, names in good.items():
        for name in names:
            attempt(str(tmp_path / name), "--flag")
    for attempt, names in bad.items():
        for name in names:
            with pytest.raises(UserError, match="--flag"):
                attempt(f"{tmp_path}/{name}", "--flag")
    for attempt in (try_folder, try_export, try_file):
        with pytest.raises(UserError, match="--flag"):
            attempt("/proc/new", "--flag")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


def test_an_export_is_apart_from_what_the_run_writes_before(tmp_path: Path) -> None:
    other = {"save_hf", "save_adapter", "wandb_save_dir", "data_cache_path"}
    # Files, whose folder has to be there.
    other |= {"routing_stats", "reference_logps", "memory_snapshot_path", "save_scores"}
    for key in set(OUTPUTS) - other:
        flag = "--" + key.replace("_", "-")
        for place in ("out", "out/inside"):
            found = refusals(f"{BASE} --save-hf {tmp_path}/out {flag} {tmp_path}/{place}")
            assert "has to be empty at the end" in found[flag][0], (flag, place)
        assert refusals(f"{BASE} --save-hf {tmp_path}/out {flag} {tmp_path}/outside") == {}


def test_an_export_into_a_directory_that_is_there(tmp_path: Path) -> None:
    """It receives the files; a link to it, too; and what an export left that was cut off is removed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "lost+found").mkdir()  # as of a new volume
    inode = disk.stat().st_ino
    (tmp_path / "link").symlink_to(disk)
    for name in ("link", "disk"):
        final = tmp_path / name
        check_target(final, "--save-hf")
        work = make_work(final, "--save-hf")
        (work / "half").touch()
        work = make_work(final, "--save-hf")
        (work / "config.json").write_text("{}")
        (work / "code").mkdir()
        (work / "code" / "a.py").touch()
        publish_work(final)
        assert sorted(os.listdir(disk)) == ["code", "config.json", "lost+found"] and disk.stat().st_ino == inode
        with pytest.raises(UserError, match="not an empty directory"):
            check_target(final, "--save-hf")
        shutil.rmtree(disk / "code")
        (disk / "config.json").unlink()


def test_files_are_written_whole_or_not(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "link").symlink_to(target)
    write_text(tmp_path / "link", "--html", "new\ud7ff")
    assert target.read_text() == "new\ud7ff" and (tmp_path / "link").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640 and sorted(os.listdir(tmp_path)) == ["link", "page.html"]
    with pytest.raises(UserError, match="--html"):
        write_text("/dev/full", "--html", "x" * 10_000)
    with pytest.raises(UserError, match="--html"):
        write_text(tmp_path, "--html", "x")


def mounted(script: str) -> subprocess.CompletedProcess[str] | None:
    """The output of Python code in a mount namespace of its own; None: none can be made here."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        return None
    return subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True)


def test_mounts_full_and_read_only(tmp_path: Path) -> None:
    for name in ("small", "fixed", "bound", "disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "bound.txt").write_text("old")
    (tmp_path / "other.txt").write_text("old")
    code = (
        "from hetero_megatron.utils.outputs import *\n"
        "from hetero_megatron.errors import UserError\n"
        "for attempt in (try_folder, try_export):\n"
        "    for place in ('small', 'fixed', 'bound'):\n"
        "        try: attempt(place, '--x'); print(attempt.__name__, place, 'taken')\n"
        "        except UserError as error: print(attempt.__name__, place, 'refused')\n"
        "write_text('bound.txt', '--x', 'new')\n"
    )
    done = mounted(
        f"cd {tmp_path} && mount -t tmpfs -o size=4k none small "
        "&& (cat /dev/zero > small/lost+found 2>/dev/null; true) "
        f"&& mount -t tmpfs -o ro none fixed && mount --bind disk bound && mount --bind other.txt bound.txt "
        f"&& {sys.executable} - <<'END'\n{code}END"
    )
    if done is None or "mount:" in done.stderr:
        pytest.skip("no mount points can be made here")
    said = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert said == {
        "try_folder small": "refused", "try_folder fixed": "refused", "try_folder bound": "taken",
        "try_export small": "refused", "try_export fixed": "refused", "try_export bound": "taken",
    }, done.stderr  # fmt: skip
    assert (tmp_path / "other.txt").read_text() == "new"
