"""CONTRIBUTING.md: the files that it lists for an example are those that hold the example's name."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.paths import ROOT

PACKAGES = ("hetero_megatron", "kernels/hetero_kernels", "plugins/hetero_plugins", "plugins/bad_vendor")
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def examples() -> dict[str, set[str]]:
    """Name of each example -> files of its table."""
    found = {}
    for part in TEXT.split("\n### ")[1:]:
        heading, body = part.split("\n", 1)
        name = re.findall(r"`(\w+)`", heading)[-1]
        rows = [line for line in body.splitlines() if line.startswith("| `")]
        found[name] = {path for row in rows for path in re.findall(r"`([^`]+)`", row.split("|")[1])}
    return found


def test_six_kinds_of_change_have_an_example() -> None:
    assert len(examples()) == 6 and all(examples().values())


@pytest.mark.parametrize("name", examples())
def test_the_listed_files_hold_the_example_and_no_other_source_does(name: str) -> None:
    exact = re.compile(rf"(?<![A-Za-z]){name}(?![a-z_])")
    spelled = re.compile(rf"(?<![a-z]){name.replace('_', '[-_]')}(?![a-z_])", re.IGNORECASE)
    listed = examples()[name]
    holds = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if exact.search(path.read_text(encoding="utf-8"))
    }
    assert holds <= listed, f"not listed: {sorted(holds - listed)}"
    assert [path for path in listed if not (ROOT / path).is_file() or not spelled.search(path + read(path))] == []


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_commands_and_links_are_there() -> None:
    targets = set(re.findall(r"make ([a-z-]+)", TEXT)) - {"alone"}
    makefile = read("Makefile")
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    for link in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / link).exists(), link


def test_the_first_forty_files_are_there_and_say_what_they_are() -> None:
    part = read("docs/architecture.md").split("## The first forty files", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| \S", part, re.MULTILINE)
    assert len(rows) == len(set(rows)) == 40
    for row in rows:
        path = row if row == "pretrain_gpt.py" else f"hetero_megatron/{row}"
        assert len(ast.get_docstring(ast.parse(read(path))) or "") > 60, path
