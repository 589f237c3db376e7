"""Counts, plurals and sizes in messages."""

from __future__ import annotations

import re

import pytest

from hetero_megatron.utils.text import dtype_name, format_bytes, format_seconds, notice_line, plural, word
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "sequence", "0 sequences"), (1, "sequence", "1 sequence"), (12_000, "token", "12,000 tokens"),
        (2, "micro-batch", "2 micro-batches"), (1, "micro-batch", "1 micro-batch"), (3, "TP group", "3 TP groups"),
        (2, "entry", "2 entries"),
    ],
)  # fmt: skip
def test_plurals(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_notices_cannot_steer_a_terminal() -> None:
    assert notice_line("weights \x1b[31mred\u202e\n  and more") == "notice: weights \\x1b[31mred\\u202e\\n  and more"


def test_every_notice_is_made_in_one_place() -> None:
    sources = [path for path in (ROOT / "hetero_megatron").rglob("*.py") if path.name != "text.py"]
    assert [path.name for path in sources if re.search("""["']notice: """, path.read_text(encoding="utf-8"))] == []


def test_verbs_and_given_plurals() -> None:
    assert [word(n, "was") for n in (1, 2)] == ["was", "were"] and word(2, "axis", "axes") == "axes"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (1e-12, "0 s"), (3e-9, "3 ns"), (4.2e-6, "4.2 us"), (0.0123, "12.3 ms"), (1.5, "1.5 s"),
        (200, "3 min 20 s"), (7500, "2 h 05 min"), (3599.9, "1 h 00 min"),
    ],
)  # fmt: skip
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 11949086147)] == ["0 B", "1023 B", "1.5 KiB", "11.13 GiB"]


def test_dtype_names() -> None:
    assert {dtype_name(n) for n in ("bf16", "bfloat16", "torch.bfloat16")} == {"bf16"} and dtype_name("int8") == "int8"
