"""Inputs that the fuzzer found (tests/fuzz): each is accepted or refused in our own words, never more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fuzz.cases import ACCEPTED, REFUSED, run
from tests.fuzz.documents import CLUSTER, ROOT

HOSTILE = Path(__file__).parent / "fixtures" / "hostile"
NAMES = sorted(str(path.relative_to(HOSTILE)) for path in HOSTILE.glob("*/*"))

# Not mended yet: a name is taken out as soon as its case is answered (which the strict mark asks for).
OPEN = {
    "checkpoints/chunk_of_too_few_axes",
    "checkpoints/chunk_too_short",
    "checkpoints/chunk_without_a_file",
    "checkpoints/metadata_of_another_type",
    "checkpoints/spec_key_of_another_type",
    "configs/config_list_for_a_name",
    "logs/event_without_a_key",
    "logs/list_for_a_key",
    "logs/list_for_a_text",
    "logs/number_for_a_list",
    "logs/text_for_a_number",
    "logs/text_for_seconds",
    "logs/value_that_is_a_list",
    "weights/number_for_a_file",
    "weights/sparse_tensor",
}
MARK = pytest.mark.xfail(strict=True, reason="not mended yet")
CASES = [pytest.param(name, marks=MARK if name in OPEN else ()) for name in NAMES]


def words(kind: str, source: Path, target: Path) -> list[str]:
    """How the program is started on an input of a kind."""
    if kind == "logs":
        return ["report", str(source), "--out", str(target / "page.html")]
    if kind == "configs":
        plan = ROOT / "tests" / "fuzz" / "two_layers.yaml"
        where = ["--plan", str(plan), "--cluster", str(CLUSTER)]
        return ["predict", *where, "--model", str(source / "config.json"), "--json"]
    return ["convert", str(source), str(target / "out"), "--json"]


@pytest.mark.parametrize("name", CASES)
def test_an_input_that_once_ended_badly_is_answered(name: str, tmp_path: Path) -> None:
    source = tmp_path / "input"
    shutil.copytree(HOSTILE / name, source)
    outcome = run(words(name.partition("/")[0], source, tmp_path))
    assert outcome.result in (ACCEPTED, REFUSED), outcome.words
