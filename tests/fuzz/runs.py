"""What a run leaves: native checkpoints, with checksums made anew, and the logs that ``report`` reads."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.fuzz import mutate

MOST_BYTES = 1 << 30  # of a file that is read here: one that was damaged before may be as large as a disk


def checkpoint(rng: random.Random, folder: Path, base: Path) -> list[str]:
    """A checkpoint whose SHA256SUMS agree with what was damaged, mostly."""
    source = folder / "checkpoint"
    shutil.copytree(base, source, symlinks=True)
    step = next(p for p in sorted(source.iterdir()) if p.name.startswith("iter_"))
    files = sorted(p for p in step.rglob("*") if p.is_file())
    for _ in range(rng.randint(1, 2)):
        target = rng.choice([p for p in files if p.suffix == ".json"] * 4 + files)
        if not target.is_file() or target.is_symlink() or target.stat().st_size > MOST_BYTES:
            continue
        if target.suffix == ".json" and rng.random() < 0.8:
            value = json.loads(target.read_bytes() or b"0") if _parses(target) else {}
            target.write_text(json.dumps(mutate.tree(rng, value)))
        elif rng.random() < 0.8:
            target.write_bytes(mutate.bytes_of(rng, target.read_bytes()))
        else:
            mutate.file(rng, target)
    sums = step / "SHA256SUMS"
    if rng.random() < 0.85 and sums.is_file() and not sums.is_symlink() and sums.stat().st_size <= MOST_BYTES:
        _sum_again(step, sums, source)
    return ["convert", str(source), str(folder / "out"), "--json"]


def _parses(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _sum_again(step: Path, sums: Path, source: Path) -> None:
    lines = []
    for line in sums.read_text(errors="replace").splitlines():
        name = line.partition("  ")[2]
        path = step / name
        usable = name and path.is_file() and not path.is_symlink() and path.stat().st_size <= MOST_BYTES
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}" if usable else line)
    sums.write_text("\n".join(lines) + "\n")
    latest = source / "latest"
    if latest.is_file():  # it may name the checksum of SHA256SUMS
        words = latest.read_text().split()
        total = hashlib.sha256(sums.read_bytes()).hexdigest()
        latest.write_text(" ".join(total if len(word) == 64 else word for word in words) + "\n")


def log(rng: random.Random, folder: Path, base: Path) -> list[str]:
    """Logs with lines and values changed."""
    run = folder / "run"
    run.mkdir()
    for path in sorted(base.iterdir()):
        if path.is_file():
            shutil.copy(path, run / path.name)
    files = [p for p in sorted(run.iterdir()) if p.suffix in (".jsonl", ".json", ".yaml")]
    target = rng.choice(files)
    for _ in range(rng.randint(1, 3)):
        if target.suffix == ".jsonl" and rng.random() < 0.75:
            lines: list[Any] = target.read_bytes().split(b"\n")
            at = rng.randrange(len(lines))
            try:
                lines[at] = json.dumps(mutate.tree(rng, json.loads(lines[at]))).encode()
            except (ValueError, RecursionError):
                lines.insert(at, json.dumps(mutate.odd_value(rng)).encode())
            target.write_bytes(b"\n".join(lines))
        else:
            target.write_bytes(mutate.bytes_of(rng, target.read_bytes()))
    if rng.random() < 0.05:
        mutate.file(rng, target)
    return (
        ["report", str(run), "--json"]
        if rng.random() < 0.4
        else ["report", str(run), "--out", str(folder / "page.html")]
    )
