"""A disk that fills while something of the data is written: one line, and no file is left. Needs root (a tmpfs)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.cache import cached_arrays
from hetero_megatron.data.indexed import IndexedWriter
from hetero_megatron.errors import UserError
from tests.support.chat import TEMPLATES, chat_tokenizer, turns


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.suffix != ".lock")


@pytest.mark.parametrize("size", [70_000, 10])
def test_tokens_and_their_index(size: int, small: Path) -> None:
    with pytest.raises(UserError, match=r"--data-cache-path = .*: cannot be written: No space left") as caught:
        with IndexedWriter(str(small / "c"), np.int32) as writer:
            for _ in range(20_000):  # of short documents, it is the index that finds no place
                writer.add(np.zeros(size, np.int32) if size > 10 else np.zeros(0, np.int32))
    assert "\n" not in str(caught.value) and left(small) == []


def test_an_index_of_samples(small: Path) -> None:
    with pytest.raises(UserError, match="No space left"):
        cached_arrays(small, "index", lambda: {"a": np.arange(100_000)}, lambda _: None)
    assert left(small) == []


def test_text_and_conversations(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_megatron.data.chat.packed.IN_MEMORY_BYTES", 0)
    folder = chat_tokenizer(tmp_path / "t", TEMPLATES["chatml"])
    text = " ".join(map(str, range(300)))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(60)))
    (tmp_path / "m.jsonl").write_text("".join(json.dumps({"messages": turns(text, text)}) + "\n" for _ in range(30)))
    for name, sft in (("c", False), ("m", True)):
        config = DataConfig(
            data_path=(str(tmp_path / f"{name}.jsonl"),), split="1", sft=sft, tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(folder), data_cache_path=str(small / "cache"),
        )  # fmt: skip
        with pytest.raises(UserError, match=r"--data-cache-path = .*No space left"):
            build_datasets(config, 32, 1, (1, 0, 0), log=lambda _: None)
        assert left(small) == ["cache"]
