"""Inputs that the fuzzer found (tests/fuzz): each is accepted or refused in our own words, never more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fuzz.cases import ACCEPTED, REFUSED, run
from tests.fuzz.documents import CLUSTER, ROOT
from tests.support.paths import FIXTURES

HOSTILE = FIXTURES / "hostile"
NAMES = sorted(str(path.relative_to(HOSTILE)) for path in HOSTILE.glob("*/*"))


def words(kind: str, source: Path, target: Path) -> list[str]:
    """How the program is started on an input of a kind."""
    if kind == "logs":
        return ["report", str(source), "--out", str(target / "page.html")]
    if kind == "configs":
        plan = ROOT / "tests" / "fuzz" / "two_layers.yaml"
        where = ["--plan", str(plan), "--cluster", str(CLUSTER)]
        return ["predict", *where, "--model", str(source / "config.json"), "--json"]
    return ["convert", str(source), str(target / "out"), "--json"]


@pytest.mark.parametrize("name", NAMES)
def test_an_input_that_once_ended_badly_is_answered(name: str, tmp_path: Path) -> None:
    source = tmp_path / "input"
    shutil.copytree(HOSTILE / name, source)
    outcome = run(words(name.partition("/")[0], source, tmp_path))
    assert outcome.result in (ACCEPTED, REFUSED), outcome.words
