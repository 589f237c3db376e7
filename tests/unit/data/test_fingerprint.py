"""What ranks compare of their data: the same of a copy, another one if any part of the corpus differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.build import PLACES, WIDTH, corpus_fingerprint
from hetero_megatron.data.indexed import TokenStore
from hetero_megatron.data.packing import PackedDataset
from tests.support.chat import TEMPLATES, chat_tokenizer, turns


def corpora(path: Path, **more: Any) -> dict[str, str]:
    config = DataConfig(**{"data_path": (str(path),), "split": "90,10", **more})
    return dict(build_datasets(config, 32, 1, (4, 4, 0), log=lambda _: None).corpora)


def write(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_another_letter_anywhere_is_another_corpus(tmp_path: Path) -> None:
    texts = [{"text": f"doc {i:04} " + "abcdefgh" * 10} for i in range(200)]
    found = corpora(write(tmp_path / "a" / "c.jsonl", texts))
    assert found == corpora(write(tmp_path / "b" / "c.jsonl", texts)) and all(found.values())
    for at, names in ((3, {"train"}), (100, {"train"}), (199, {"valid"})):
        changed = [*texts]
        changed[at] = {"text": changed[at]["text"].replace("c", "Z", 1).replace("dob", "doc")}
        other = corpora(write(tmp_path / "c" / "c.jsonl", changed))
        # A split is compared with all of its store: what differs in either is found.
        assert any(other[name] != found[name] for name in names)
    assert corpora(write(tmp_path / "d" / "c.jsonl", texts[:-1])) != found
    ids = [{"text": "1 2 3 4 5 6 7 8 9"} for _ in range(200)]
    path = write(tmp_path / "n" / "c.jsonl", ids)
    sizes = [corpora(path, tokenizer_type="NullTokenizer", vocab_size=size) for size in (10, 11, 10)]
    assert sizes[0] == sizes[2] != sizes[1]


def test_conversations_and_their_masks(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "t", TEMPLATES["chatml"])
    records = [{"messages": turns(f"ask {i}", f"answer {i}")} for i in range(50)]
    more = {"sft": True, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    found = corpora(write(tmp_path / "c.jsonl", records), **more)
    records[20]["messages"][1]["loss"] = False  # the same tokens
    assert corpora(write(tmp_path / "c.jsonl", records), **more) != found


def test_of_a_long_corpus_places_all_over_it_are_read() -> None:
    tokens = np.arange(20 * PLACES * WIDTH, dtype=np.int32) % 1000
    offsets = np.arange(0, len(tokens) + 1, 100, dtype=np.int64)

    def of(tokens: np.ndarray, offsets: np.ndarray = offsets) -> str:
        store = TokenStore("c", "c", tokens, offsets)
        return corpus_fingerprint(PackedDataset(store, (0, store.num_documents), 32, 1), "t")

    assert of(tokens) == of(tokens.astype(np.int64))  # however wide they are stored
    for part in range(1000):  # a thousandth of the corpus differs
        other = tokens.copy()
        size = len(tokens) // 1000
        other[part * size : (part + 1) * size] += 1
        assert part % 50 or of(other) != of(tokens)
    moved = offsets.copy()
    moved[1:-1] += 1
    assert of(tokens, moved) != of(tokens)


def test_streams_of_other_bytes_are_other_streams(tmp_path: Path) -> None:
    """Files: any of them, near their beginning, in their middle or of another size; conversations and blends."""
    folder = chat_tokenizer(tmp_path / "t", TEMPLATES["chatml"])
    chats = {"sft": True, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    records = [{"text": f"doc {i:04}", "messages": turns(f"ask {i:04}", "answer")} for i in range(2000)]

    def streams(name: str, more: dict[str, Any], *paths: Path) -> dict[str, str]:
        words = tuple(word for path in paths for word in (("1", str(path)) if len(paths) > 1 else (str(path),)))
        config = DataConfig(train_data_path=words, dataloader_type="streaming", **more)
        return dict(build_datasets(config, 32, 1, (4, 0, 0), log=lambda _: None).read_here())

    def files(name: str, at: int | None = None) -> list[Path]:
        changed = [*records]
        if at is not None:
            changed[at] = {**changed[at], "messages": turns("ask ZZZZ", "answer"), "text": "doc ZZZZ"}
        half = len(changed) // 2
        (tmp_path / name).mkdir()
        return [write(tmp_path / name / f"{i}.jsonl", part) for i, part in enumerate((changed[:half], changed[half:]))]

    one, two = files("one"), files("two")
    for more, paths in ({}, slice(1)), (chats, slice(1)), (chats, slice(2)):
        found = streams("one", more, *one[paths])
        assert found == streams("two", more, *two[paths]) and found["train"] and not found["valid"]
        for i, at in enumerate((3, 500, 999, 1500)[: 3 if paths.stop == 1 else 4]):
            other = files(f"{i} {paths.stop} {len(more)}", at)
            assert streams("other", more, *other[paths]) != found, at
    assert streams("one", {"tokenizer_type": "NullTokenizer", "vocab_size": 10}, one[0]) != streams("one", {}, one[0])
