"""How slow tests are shared out among processes."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT
from tests.support.scopes import SCOPE_OF, scope_of


def test_files_that_emulate_clusters_are_scopes_of_their_kind() -> None:
    kinds = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for kind in re.findall(r'mark\.testbed(?:\("(\w+)"\))?', path.read_text(encoding="utf-8")):
            kinds[str(path.relative_to(ROOT))] = kind or "testbed"
    assert kinds == {file: scope for file, scope in SCOPE_OF.items() if scope in ("testbed", "hosts")}
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
