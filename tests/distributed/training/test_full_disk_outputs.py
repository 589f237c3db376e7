"""A disk that is full where a run writes what it need not: said once, nothing half written stays, and training goes on
to its end. Needs root (a tmpfs)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero_megatron.cli import early
from hetero_megatron.cli.main import main
from tests.distributed.training.test_moe_run import MODEL
from tests.support.programs import inside

DATA = ["--mock-data", "--seq-length", "16", "--micro-batch-size", "2", "--train-iters", "3", "--lr", "1e-3"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a folder of 16 KiB on a disk of its own."""
    made: list[Path] = []

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        for number in range(16):
            (folder / f"fill{number}").write_bytes(b"0" * 4096)


def test_profile_and_page(
    small: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = small("page")
    words = [*DATA, "--model", "tiny", "--profile", "--profile-step-start", "1", "--profile-step-end", "3"]
    for run, more in (("plain", []), ("torch", ["--use-pytorch-profiler", "--profile-ranks", "0"])):
        folder = small(f"{run}/profile")
        if run == "plain":  # whose trace is short
            fill(folder)
        before = sorted(path.name for path in folder.iterdir())
        out, _ = inside([*words, *more, "--save", str(tmp_path / run)])
        said = [line for line in out.splitlines() if f"notice: {folder} on rank 0" in line]
        assert len(said) == 1 and "training goes on" in said[0] and "done: 3 steps" in out, out
        assert sorted(path.name for path in folder.iterdir()) == before
    fill(page)
    before = sorted(path.name for path in page.iterdir())
    capsys.readouterr()
    assert main(["report", str(tmp_path / "plain"), "--out", str(page / "page.html")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "--out = " in said[0] and "No space left" in said[0]
    assert sorted(path.name for path in page.iterdir()) == before


def test_routing_statistics(
    small: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk fills after the file was tried."""
    folder = small("stats")
    fill(folder)
    before = sorted(path.name for path in folder.iterdir())
    words = [*DATA, *MODEL.split(), "--vocab-size", "100", "--save", str(tmp_path / "run")]
    words += ["--routing-stats", str(folder / "s.json")]
    with monkeypatch.context() as later:
        later.setitem(early.OUTPUTS, "routing_stats", lambda name, field: None)
        out, _ = inside(words)
    assert out.count("--routing-stats = ") == 1 and "No space left" in out and "done: 3 steps" in out, out
    _, error = inside(words, 2)
    assert "--routing-stats = " in error and "No space left" in error
    assert sorted(path.name for path in folder.iterdir()) == before
