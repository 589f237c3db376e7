"""How slow tests are shared out among processes."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT
from tests.support.scopes import CLUSTERS, SCOPE_OF, SCOPES, SECONDS, LongestFirst, scope_of


def test_files_that_emulate_clusters_are_one_scope() -> None:
    marked = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"mark\.testbed\b", path.read_text(encoding="utf-8")):
            marked.add(str(path.relative_to(ROOT)))
    assert marked == set(SCOPES[CLUSTERS])
    assert [file for file in SCOPE_OF if not (ROOT / file).exists()] == []


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("tests/slow/test_commands.py::test_block_runs[docs/a.md:9]", "docs/a.md:11]", True),
        ("tests/slow/test_commands.py::test_block_runs[docs/a.md:9]", "docs/b.md:9]", False),
        ("tests/slow/test_lost_hosts.py::test_a[x:1]", "y]", True),
        ("tests/unit/plan/test_plan.py::test_a[x:1]", "x:2]", False),
    ],
)
def test_what_one_process_runs(one: str, other: str, together: bool) -> None:
    assert (scope_of(one) == scope_of(one.partition("[")[0] + "[" + other)) == together


def test_what_takes_longest_starts_first_and_is_there() -> None:
    queue = LongestFirst({"one test": {"": False}, "tests": {"a": False, "b": False}, CLUSTERS: {"": False}})
    assert [queue.popitem()[0] for _ in range(3)] == [CLUSTERS, "tests", "one test"]
    for scope in SECONDS.keys() - SCOPES.keys():
        file, _, name = scope.partition("::")
        if name:
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), scope
        else:
            assert (ROOT / scope.removeprefix("test_block_runs[")).exists(), scope
