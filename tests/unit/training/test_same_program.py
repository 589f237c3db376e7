"""Ranks of one job run one program; torch and plugins may differ between unlike chips only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.platform.plugins import Plugin, Plugins, PluginSource
from hetero_megatron.training import agreement
from hetero_megatron.training.agreement import check_program, digest

PROGRAM = {"version of hetero_megatron": "1", "sources of hetero_megatron": "aa"}
Told = tuple[str, dict[str, str], dict[str, str]]


class Ranks:
    """A group in which the others say what is given."""

    def __init__(self, *others: Told, index: int = 0) -> None:
        self.others, self.index = others, index
        self.size, self.ranks = len(others) + 1, tuple(range(len(others) + 1))

    def gather_objects(self, mine: Told, _: Any) -> list[Told]:
        return [mine, *self.others]


class Chip:
    name, accelerator, device = "cpu", None, None


def judged(monkeypatch: pytest.MonkeyPatch, *others: Told) -> None:
    mine = {"torch": "2.13", "plugin a": "1 ff"}
    monkeypatch.setattr(agreement, "environment", lambda plugins: mine)
    monkeypatch.setattr(agreement, "digest", lambda files: "aa")
    monkeypatch.setattr(agreement, "__version__", "1")
    check_program(Ranks(*others), Chip(), Plugins([], None, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "around", "said"),
    [
        ({"version of hetero_megatron": "2"}, {}, "version of hetero_megatron: rank 1 has 2, rank 0 has 1"),
        ({"sources of hetero_megatron": "bb"}, {}, "sources of hetero_megatron: rank 1 has bb, rank 0 has aa"),
        ({}, {"torch": "2.12"}, "torch: rank 1 has 2.12, rank 0 has 2.13. Accepted: the same releases"),
        ({}, {"plugin a": "1 fe"}, "plugin a: rank 1 has 1 fe, rank 0 has 1 ff"),
        ({}, {"plugin b": "3"}, "plugin b: rank 1 has 3, rank 0 has none"),
    ],
)
def test_what_differs_on_chips_alike_is_refused(
    program: dict[str, str], around: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ("cpu", PROGRAM | program, {"torch": "2.13", "plugin a": "1 ff"} | around)
    with pytest.raises(UserError) as caught:
        judged(monkeypatch, other)
    assert str(caught.value).startswith(said)


def test_unlike_chips_may_have_other_releases_but_no_other_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(monkeypatch, ("npu.1", PROGRAM, {"torch": "2.11", "plugin a": "1 ff"}))
    assert capsys.readouterr().out == "notice: torch: rank 1 (npu.1) has 2.11, rank 0 (cpu) has 2.13\n"
    two = ("npu.1", PROGRAM, {"torch": "2.11", "plugin a": "1 ff"}), ("npu.1", PROGRAM, {"torch": "2.10"})
    with pytest.raises(UserError, match=r"torch: rank 2 has 2.10, rank 1 has 2.11"):
        judged(monkeypatch, *two)
    with pytest.raises(UserError, match="sources of"):
        judged(monkeypatch, ("npu.1", PROGRAM | {"sources of hetero_megatron": "bb"}, {}))


def test_the_digest_is_of_names_and_contents_and_of_nothing_else(tmp_path: Path) -> None:
    def of(folder: Path) -> str:
        return digest((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))

    one, two = tmp_path / "one", tmp_path / "two"
    (one / "b").mkdir(parents=True)
    (one / "a.py").write_text("x = 1\n")
    (one / "b" / "c.py").write_text("y = 2\n")
    shutil.copytree(one, two)
    (two / "b" / "__pycache__").mkdir()
    (two / "b" / "__pycache__" / "c.pyc").write_bytes(b"z")
    assert of(one) == of(two)
    (two / "a.py").write_text("x = 2\n")
    assert of(one) != of(two)
    (two / "a.py").rename(two / "d.py")
    (two / "d.py").write_text("x = 1\n")
    assert of(one) != of(two)


def test_a_plugin_is_known_by_version_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hetero_mine.py").write_text("HETERO_PLUGIN_API = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    good = Plugin(PluginSource("mine", "hetero_mine", "entry point", "0.3"))
    plugins = Plugins([good, Plugin(PluginSource("cpu", "hetero_plugins.cpu", "built in"))], None, {})  # type: ignore[arg-type]
    before = agreement.environment(plugins)
    assert set(before) == {"torch", "plugin mine"} and before["plugin mine"].startswith("0.3 ")
    (tmp_path / "hetero_mine.py").write_text("HETERO_PLUGIN_API = 1  # other\n")
    assert agreement.environment(plugins) != before
    good.error = "ImportError: no such chip"
    assert agreement.environment(plugins)["plugin mine"] == "one that is broken: ImportError: no such chip"
