"""Llama2Tokenizer against what the sentencepiece library gives for the same file (tests/fixtures/llama2)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_megatron.data.config import build_tokenizer
from hetero_megatron.data.sentencepiece_model import read_model
from hetero_megatron.errors import UserError
from tests.support.paths import FIXTURES

FOLDER = FIXTURES / "llama2"
MODEL = FOLDER / "tokenizer.model"


def test_ids_are_those_of_sentencepiece_with_the_beginning_of_a_sequence() -> None:
    for place in (MODEL, FOLDER):
        tokenizer = build_tokenizer("Llama2Tokenizer", str(place))
        assert (tokenizer.vocab_size, tokenizer.eod) == (600, 2)
        for text, ids, back in json.loads((FOLDER / "encoded.json").read_text()):
            assert tokenizer.encode(text).tolist() == [1, *ids], text
            assert tokenizer.decode(tokenizer.encode(text)) == back, text


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    data = MODEL.read_bytes()
    file = tmp_path / "tokenizer.model"
    kinds = {
        "unigram": b"\x18\x01".join(data.rsplit(b"\x18\x02", 1)),  # of how it was trained
        "nothing": b"", "text": b"a tokenizer\n" * 20, "json": b'{"model": {"type": "BPE"}}',
        "without pieces": b"\x12\x02\x18\x02", "twice": data + data[:20],
    }  # fmt: skip
    for name, damaged in kinds.items():
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="--tokenizer-model") as refused:
            read_model(str(file), "--tokenizer-model")
        assert len(str(refused.value).splitlines()) == 1, name
    for cut in range(0, len(data), 97):  # cut anywhere: refused, or what is left is a model
        file.write_bytes(data[:cut])
        try:
            read_model(str(file), "--tokenizer-model")
        except UserError as error:
            assert "--tokenizer-model" in str(error)
    with pytest.raises(UserError, match="--tokenizer-model"):
        build_tokenizer("Llama2Tokenizer", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="--tokenizer-model"):
        build_tokenizer("Llama2Tokenizer")
