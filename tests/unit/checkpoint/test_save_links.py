"""What stands in the way of a save: links are not followed, others' files stay, and nothing of it ends training."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.checkpoint.directory import CheckpointDirectory
from hetero_megatron.checkpoint.export import make_work, publish_work, work_of
from hetero_megatron.checkpoint.lock import DirectoryLock
from hetero_megatron.checkpoint.native import check_writable
from tests.distributed.checkpoint.test_save_directory import RUN
from tests.support.programs import inside
from tests.support.refusals import refused
from tests.support.tiny_checkpoint import alone, load, save


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A directory of somebody else, with a file in it."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("precious")
    return tmp_path / "other"


def test_links_are_not_followed(other: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1, 1)
    for name in (".shared", "latest.new"):
        (run / name).symlink_to(other / "file")
    for name in ("iter_0000002", "iter_0000002.incomplete", "iter_0000001.old", "iter_0000009.incomplete"):
        (run / name).symlink_to(other)
    (run / "iter_0000008.incomplete").symlink_to(tmp_path / "nowhere")
    check_writable(str(run), alone())
    save(run, 2, 2)
    assert load(run, log=pytest.fail) is not None
    assert [p.name for p in other.iterdir()] == ["file"] and (other / "file").read_text() == "precious"
    assert sorted(p.name for p in run.iterdir()) == [".shared", "iter_0000001", "iter_0000002", "latest"]
    assert (run / "iter_0000002").is_dir() and not (run / "iter_0000002").is_symlink()


def test_a_link_in_place_of_an_old_one_is_pruned(other: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1, 1)
    shutil.move(run / "iter_0000001", other / "archived")
    (run / "iter_0000001").symlink_to(other / "archived")
    assert load(run) is not None  # moved to another disk by its owner
    for step in (2, 3):
        save(run, step, step, keep=1)
    assert sorted(p.name for p in run.iterdir()) == ["iter_0000003", "latest"]
    assert len(list((other / "archived").iterdir())) == 4


def test_files_and_folders_of_these_names_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "latest.new" / "full").mkdir(parents=True)
    for name in ("iter_0000001", "iter_0000001.incomplete", "iter_0000001.old", "iter_0000003.old"):
        (tmp_path / name).write_text("")
    save(tmp_path, 1, 1)
    found = load(tmp_path)
    assert found is not None and found[0] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", "latest", "latest.new.1.incomplete"]


def test_what_cannot_be_removed_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saves go on, of steps whose names are taken as well; and when it can be removed again, it is."""

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    (tmp_path / "iter_0000004.incomplete").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        directory = CheckpointDirectory(tmp_path)
        for step in (1, 2, 3, 4):
            work = directory.begin(step)
            (work / "SHA256SUMS").write_text("")
            directory.publish(step)
            directory.prune(1, None, step)
        assert directory.steps() == [4] and directory.latest() == 4
        assert len(list(tmp_path.glob("*.incomplete"))) == 4
        said = capsys.readouterr().out
        assert said.count("cannot be removed (Operation not permitted") == 1 and said.count("notice") == 1
    save(tmp_path, 5, 5)
    assert load(tmp_path) is not None and not list(tmp_path.glob("*.incomplete"))


@pytest.mark.parametrize("how", ["moved", "removed", "replaced", "link turned"])
def test_a_directory_that_is_lost_is_not_made_anew(how: str, tmp_path: Path) -> None:
    real, run = tmp_path / "real", tmp_path / "run"
    real.mkdir()
    run.symlink_to(real) if how == "link turned" else real.rename(run)
    lock = DirectoryLock(run)
    assert lock.take() and not lock.lost()
    save(run, 1, 1, check=lock.check)
    if how == "link turned":
        run.unlink()
        (tmp_path / "new").mkdir()
        run.symlink_to(tmp_path / "new")
    elif how == "removed":
        shutil.rmtree(run)
    else:
        run.rename(tmp_path / "elsewhere")
    if how == "replaced":
        (run / "iter_0000002.incomplete").mkdir(parents=True)  # another run's
    with refused("--save", "no longer the directory"):
        save(run, 2, 2, check=lock.check)
    assert run.exists() == (how in ("replaced", "link turned"))
    assert how != "replaced" or [p.name for p in run.iterdir()] == ["iter_0000002.incomplete"]
    assert how != "moved" or load(tmp_path / "elsewhere") is not None
    lock.release()


def test_a_run_ends_when_its_directory_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next step, not when it would have saved, with 2; where it was moved to, all of it is whole."""

    def move(*_: Any, **__: Any) -> float:  # when all is built, before the first step
        (tmp_path / "run").rename(tmp_path / "moved")
        return 0.0

    monkeypatch.setattr("hetero_megatron.training.node_data.unigram_entropy", move)
    words = [*RUN, "--train-iters", "9", "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    _, err = inside(words, code=2)
    assert "is no longer the directory that this run began with" in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "moved" / "metrics.jsonl").read_text().count('"loss"') == 1


@pytest.mark.parametrize("kind", ["folder", "file", "link", "ours", "empty"])
def test_an_export_removes_only_what_an_export_left(kind: str, other: Path, tmp_path: Path) -> None:
    final = tmp_path / "out"
    work = work_of(final)
    if kind == "ours":
        make_work(final, "--save-hf")
        (work / "model.safetensors").write_bytes(b"half")
    elif kind == "folder":
        other.rename(work)
    elif kind == "link":
        work.symlink_to(other)
    else:
        work.mkdir() if kind == "empty" else work.write_text("precious")
    if kind in ("ours", "empty"):
        make_work(final, "--save-hf")
        publish_work(final)
        assert os.listdir(final) == []
    else:
        with refused("--save-hf", "cut off"):
            make_work(final, "--save-hf")
        assert (work if kind == "file" else work / "file").read_text() == "precious"


def test_a_run_says_so_before_it_trains(other: Path, tmp_path: Path) -> None:
    other.rename(tmp_path / "out.incomplete")
    out, err = inside([*RUN, "--train-iters", "1", "--save-hf", str(tmp_path / "out")], code=2)
    assert "out.incomplete first, which exists" in err and "data:" not in out
    assert (tmp_path / "out.incomplete" / "file").read_text() == "precious"
