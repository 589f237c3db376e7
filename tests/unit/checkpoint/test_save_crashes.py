"""A job may end between any two operations on the file system: what it saved before, or was saving, is loaded."""

from __future__ import annotations

import io
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.selection import quick
from tests.support.tiny_checkpoint import load, save, values

OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "posix_fallocate")
ENDED = 77  # exit code of a process that was ended


class Ended:
    """Ends this process before its operation number ``at`` that changes the file system."""

    def __init__(self, at: int) -> None:
        self.left = at
        for name in OPERATIONS:
            self.watch(os, name)
        self.watch(io, "open")

    def watch(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or set("wxa") & set(args[1] if len(args) > 1 else kwargs.get("mode", "r")):
                self.count(name, args)
            return real(*args, **kwargs)

        setattr(module, name, operation)

    def count(self, name: str, args: tuple[Any, ...]) -> None:
        self.left -= 1
        if self.left >= 0:
            return
        if name == "fsync" and os.fstat(args[0]).st_size and not os.path.isdir(f"/proc/self/fd/{args[0]}"):
            os.ftruncate(os.open(f"/proc/self/fd/{args[0]}", os.O_WRONLY), 1)  # what is not synchronised may be lost
        os._exit(ENDED)


def ends_after(operations: int, work: Callable[[], None]) -> bool:
    """Whether the process that did ``work`` was ended, which it is after so many operations."""
    child = os.fork()
    if not child:
        code = 1
        try:
            Ended(operations)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, ENDED)
    return code == ENDED


def crashes(start: Path, work: Callable[[Path], None]) -> Iterator[Path]:
    """What ``work`` leaves of a copy of ``start`` if it is ended after 0, 1, 2, … operations; last if it is not."""
    for operations in range(1000):
        copy = start.with_name(f"{start.name}-{operations}")
        if start.exists():
            shutil.copytree(start, copy, symlinks=True)
        ended = ends_after(operations, lambda: work(copy))  # noqa: B023
        yield copy
        shutil.rmtree(copy, ignore_errors=True)
        if not ended:
            assert operations > 10, "the operations were not seen"
            return


# name -> (saves before: step and seed; the save that is cut off; how many are kept)
SAVES: dict[str, tuple[list[tuple[int, int]], tuple[int, int], int]] = {
    "first": ([], (1, 11), 0),
    "next": ([(1, 11)], (2, 12), 0),
    "replacing the latest": ([(1, 11)], (1, 12), 0),
    "replacing the latest of two": ([(1, 11), (2, 12)], (2, 13), 0),
    "replacing an older one": ([(1, 11), (2, 12)], (1, 13), 0),
    "pruning": ([(1, 11), (2, 12), (3, 13)], (4, 14), 1),
    "replacing and pruning": ([(1, 11), (2, 12), (3, 13)], (3, 14), 2),
}


def check(path: Path, allowed: set[tuple[int, int] | None]) -> tuple[int, int] | None:
    """What is loaded is one of the saves that may be, bit for bit; and it can be asked for by its step as well."""
    found = load(path, log=lambda _: None)
    if found is None:
        assert None in allowed
        return None
    step, seed, tensors = found
    assert (step, seed) in allowed
    for name, tensor in values(seed).items():
        assert torch.equal(tensors[name], tensor), name
    asked = load(path, step)
    assert asked is not None and asked[1] == seed
    return step, seed


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(SAVES, ["next", "replacing the latest"]))
def test_every_moment_of_a_save(name: str, tmp_path: Path) -> None:
    """After each, a run goes on from the newest complete save, and its own next save is as good as any."""
    before, (step, seed), keep = SAVES[name]
    start = tmp_path / "run"
    for old, its in before:
        save(start, old, its)
    newest: set[tuple[int, int] | None] = {before[-1] if before else None}
    seen = []
    for path in crashes(start, lambda copy: save(copy, step, seed, keep)):
        seen.append(check(path, {*newest, (step, seed)}))
        save(path, 9, 19, keep)
        assert check(path, {(9, 19)}) == (9, 19)
        assert not list(path.glob("*.old")) and not list(path.glob("*.incomplete")), "leftovers stay"
    assert set(seen) == {*newest, (step, seed)} and seen[-1] == (step, seed)
    assert seen == sorted(seen, key=[*newest, (step, seed)].index), "it went back"


@pytest.mark.parametrize("first", quick([True, False], [], [False]))
def test_a_run_that_is_ended_again_and_again(first: bool, tmp_path: Path) -> None:
    """Every moment of the save that follows where a first one, or a replacement, was ended while it was published."""
    start, published = tmp_path / "run", 0
    if not first:
        save(start, 1, 11)
    for once in crashes(start, lambda copy: save(copy, 1, 12)):
        if not list(once.glob("*.old")) and ((once / "latest").exists() or not (once / "iter_0000001").exists()):
            continue  # like the end of another save
        published += 1
        known = check(once, {(1, 11), (1, 12)})
        for twice in crashes(once, lambda copy: save(copy, 2, 13)):
            check(twice, {known, (2, 13)})
    assert published > 3


def test_what_was_cut_off_is_told(tmp_path: Path) -> None:
    save(tmp_path / "first", 1, 11)
    (tmp_path / "first" / "latest").unlink()
    said: list[str] = []
    assert load(tmp_path / "first", log=said.append) is not None
    assert len(said) == 1 and "latest is missing, as after a save that was cut off" in said[0]
    save(tmp_path / "again", 1, 11)
    named = (tmp_path / "again" / "latest").read_bytes()
    (tmp_path / "again" / "iter_0000001").rename(tmp_path / "again" / "iter_0000001.old")
    (tmp_path / "first" / "iter_0000001").rename(tmp_path / "again" / "iter_0000001")
    (tmp_path / "other").mkdir()
    assert load(tmp_path / "again", log=said.append) is not None and len(said) == 1  # the same numbers: no matter which
    save(tmp_path / "other", 1, 12)
    shutil.rmtree(tmp_path / "again" / "iter_0000001")
    (tmp_path / "other" / "iter_0000001").rename(tmp_path / "again" / "iter_0000001")
    found = load(tmp_path / "again", log=said.append)
    assert found is not None and found[1] == 11
    assert "was being replaced when a save was cut off" in said[-1] and "iter_0000001.old, is taken" in said[-1]
    assert (tmp_path / "again" / "latest").read_bytes() == named, "loading changes nothing"
