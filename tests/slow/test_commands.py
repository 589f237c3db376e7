"""Every ```bash block of README.md and docs/ runs here, unless a comment before it says why not.

A block is left out by ``<!-- not run: reason -->`` on the line before it, or with one blank line between. What another
block says too, line by line, is run as a part of that one. Blocks of a page go on where those before them ended: one
process of pytest runs them, in their order (``tests/support/scopes.py``). README.md's run as they stand there; in those
of docs/ ``.venv/bin`` is a folder whose programs are forked from a process with torch (``tests/support/quick_start``).
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

import pytest

from tests.support.paths import ROOT
from tests.support.quick_start import NAMES

BLOCK = re.compile(
    r"(?:<!-- not run: *(?P<reason>[^>]*?) *-->\n\n?)?^```bash\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
# Words of blocks that need the interpreters of .venv: they ask for their processes, or for what an import decides.
INTERPRETER = ("make ", "testbed", "plugins", "pytest", "pgrep", "benchmarks/")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    code: str
    reason: str | None  # why it is not run; None: it is

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def find_blocks(text: str, page: str) -> list[Block]:
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, found["code"], found["reason"])
        for found in BLOCK.finditer(text)
    ]


def all_blocks() -> list[Block]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    return [block for page, text in texts.items() for block in find_blocks(text, page)]


def without_repeated(blocks: list[Block]) -> list[Block]:
    """The blocks whose lines are no part of another's; of equal ones the first."""

    def repeats(i: int, j: int) -> bool:
        mine, its = blocks[i].code, blocks[j].code
        return "\n" + mine in "\n" + its and (mine != its or j < i)

    every = range(len(blocks))
    return [blocks[i] for i in every if not any(repeats(i, j) for j in every if j != i)]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return kept | {"ARGS": "--train-iters 4 --lr-warmup-iters 2"}  # of `make demo`: 60 steps say nothing else


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", without_repeated([b for b in all_blocks() if b.reason is None]), ids=str)
def test_block_runs(block: Block, request: pytest.FixtureRequest) -> None:
    kept, code = environment(), block.code
    kept["PATH"] = f"{ROOT / '.venv' / 'bin'}:{kept['PATH']}"
    if block.page != "README.md" and not any(word in code for word in INTERPRETER):
        programs = request.getfixturevalue("forked_programs")
        kept["PATH"] = f"{programs}:{kept['PATH']}"
        for name in NAMES:
            code = code.replace(f".venv/bin/{name} ", f"{programs / name} ")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=ROOT,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{block}\n{block.code}\n{done.stdout.decode(errors='replace')[-4000:]}"


def test_blocks_are_found_with_their_reasons() -> None:
    text = "a\n\n```bash\nmake demo\n```\n\n<!-- not run: needs a GPU -->\n```bash\nfalse\n```\n"
    text += "```text\nno\n```\n"
    assert find_blocks(text, "p.md") == [
        Block("p.md", 4, "make demo\n", None),
        Block("p.md", 9, "false\n", "needs a GPU"),
    ]


def test_what_another_block_runs_is_not_run_again() -> None:
    texts = ("b\n", "a\nb\n", "a\nb\n", "c\n", "cc\n")
    part, one, same, other, longer = (Block("p.md", i, text, None) for i, text in enumerate(texts))
    assert without_repeated([part, one, same, other, longer]) == [one, other, longer]


def test_what_is_not_run_says_why() -> None:
    assert [str(block) for block in all_blocks() if block.reason == ""] == []
