"""CONTRIBUTING.md: its lists of files are what an addition touches, and its commands are there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
PRODUCT = ("hetero_megatron", "kernels", "plugins")
# The planner needs nothing for a new schedule; vendors that are planted faults are no example.
LEFT_OUT = ("hetero_megatron/planner/", "plugins/bad_vendor/")


def examples() -> dict[str, list[str]]:
    """Files by the word that finds the example."""
    part = PAGE.read_text(encoding="utf-8").partition("\n## Where to add\n")[2]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")][1:]
    return {row[1].strip(" `"): re.findall(r"`([\w/.-]+)`", row[2]) for row in rows}


def holds(path: Path, word: str) -> bool:
    pattern = rf"\b{word.replace('-', '[-_]')}\b"
    return re.search(pattern, f"{path.stem}\n{path.read_text(encoding='utf-8')}", re.IGNORECASE) is not None


def test_every_list_is_complete_and_every_file_is_part_of_its_example() -> None:
    found = examples()
    assert len(found) == 6
    sources = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    for word, files in found.items():
        strangers = [name for name in files if not holds(ROOT / name, word)]
        assert strangers == [], f"{word}: named without a reason"
        touched = {str(path.relative_to(ROOT)) for path in sources if holds(path, word)}
        missing = {name for name in touched if not name.startswith(LEFT_OUT)} - set(files)
        assert missing == set(), f"{word}: not in the list"
        assert any(name.startswith(("tests/", "docs/")) for name in files), word


def test_its_commands_are_there() -> None:
    text, makefile = PAGE.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"make ([a-z]+(?:-[a-z]+)*)", text))
    assert {"check", "test", "lint", "types"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)
    for module in re.findall(r"python -m (hetero_megatron[\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert (ROOT / target).exists(), target
