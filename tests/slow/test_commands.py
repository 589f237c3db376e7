"""Every ```bash block of README.md and docs/ runs here, unless a comment before it says why not.

A block is left out by ``<!-- not run: reason -->`` on the line before it, or with one blank line between.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

import pytest

from tests.support.paths import ROOT

BLOCK = re.compile(
    r"(?:<!-- not run: *(?P<reason>[^>]*?) *-->\n\n?)?^```bash\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [b for b in all_blocks() if b.reason is None], ids=str)
def test_block_runs(block: Block) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    kept["PATH"] = f"{ROOT / '.venv' / 'bin'}:{kept['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
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


def test_what_is_not_run_says_why() -> None:
    assert [str(block) for block in all_blocks() if block.reason == ""] == []
