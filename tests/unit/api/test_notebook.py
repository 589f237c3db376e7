"""The notebook runs from top to bottom, and its pages are drawn inline."""

from __future__ import annotations

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[3] / "examples" / "plan.ipynb"


@pytest.mark.slow
def test_every_cell_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As Jupyter does it: in one namespace, and the value of a cell's last expression is shown."""
    drawn: list[str] = []
    display = types.SimpleNamespace(HTML=drawn.append)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    book = json.loads(NOTEBOOK.read_text())
    assert all(not cell.get("outputs") for cell in book["cells"])  # kept without results
    names: dict[str, Any] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(ast.parse("".join(cell["source"])), str(NOTEBOOK), "exec"), names)
    told = capsys.readouterr().out
    assert "best plan:" in told and "torchtitan's best of" in told and "[parallelism]" in told
    assert len(drawn) == 2 and all("<svg" in page or "<canvas" in page for page in drawn)
