"""Megatron's .bin/.idx: against bytes laid out by hand, in round trips, damaged in every field; and its tool."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.cli import preprocess
from hetero_megatron.data import DataConfig, build_datasets, build_tokenizer
from hetero_megatron.data.corpus import is_indexed
from hetero_megatron.data.indexed import IndexedWriter, open_indexed, token_dtype, write_indexed
from hetero_megatron.errors import UserError

# Three sequences of int32 tokens in two documents: [5 6 7] [8] | [9 10]
INDEX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<Q", 1)
    + struct.pack("<B", 4)
    + struct.pack("<QQ", 3, 3)
    + struct.pack("<3i", 3, 1, 2)
    + struct.pack("<3q", 0, 12, 16)
    + struct.pack("<3q", 0, 2, 3)
)
TOKENS = struct.pack("<6i", 5, 6, 7, 8, 9, 10)


def put(folder: Path, index: bytes = INDEX, tokens: bytes = TOKENS) -> str:
    prefix = str(folder / "data")
    Path(prefix + ".idx").write_bytes(index)
    Path(prefix + ".bin").write_bytes(tokens)
    return prefix


def test_bytes_laid_out_by_hand_are_read(tmp_path: Path) -> None:
    store = open_indexed(put(tmp_path))
    assert store.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert store.offsets.tolist() == [0, 4, 6]
    assert store.num_documents == 2 and store.num_tokens == 6


def test_the_writer_gives_the_bytes_laid_out_by_hand(tmp_path: Path) -> None:
    write_indexed(str(tmp_path / "w"), [np.array([5, 6, 7]), np.array([8]), np.array([9, 10])], np.int32)
    assert (tmp_path / "w.bin").read_bytes() == TOKENS
    one_sequence_per_document = INDEX[:26] + struct.pack("<Q", 4) + INDEX[34:-24] + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "w.idx").read_bytes() == one_sequence_per_document


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_round_trip(tmp_path: Path, dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 100, n) for n in rng.integers(0, 9, 50)]
    write_indexed(str(tmp_path / "w"), documents, dtype)
    store = open_indexed(str(tmp_path / "w"))
    assert store.tokens.dtype == dtype and store.num_documents == 50
    for document, a, b in zip(documents, store.offsets[:-1], store.offsets[1:]):
        assert store.tokens[a:b].tolist() == document.tolist()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.bin", "w.idx"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedWriter(str(tmp_path / "w"), np.int32) as writer:
        writer.add(np.arange(3))
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_token_types_are_megatrons() -> None:
    assert token_dtype(65499) is np.uint16 and token_dtype(65500) is np.int32


def patch(position: int, value: bytes) -> bytes:
    return INDEX[:position] + value + INDEX[position + len(value) :]


@pytest.mark.parametrize(
    ("index", "tokens", "says"),
    [
        (b"", TOKENS, "not an index"),
        (b"MMID", TOKENS, "truncated: 4 bytes"),
        (b"TNTIDX\x00\x00" + INDEX[8:], TOKENS, "TNTIDX"),
        (INDEX[:20], TOKENS, "truncated: 20 bytes"),
        (INDEX[:-1], TOKENS, "truncated: 93 bytes where the header promises 94"),
        (INDEX[:40], TOKENS, "truncated: 40 bytes"),
        (INDEX + b"12", TOKENS, "too long"),
        (INDEX + b"123", TOKENS, "multimodal"),
        (patch(9, b"\x02"), TOKENS, "version 2"),
        (patch(17, b"\x09"), TOKENS, "type code 9"),
        (patch(17, b"\x07"), TOKENS, "float32"),
        (patch(17, b"\x05"), TOKENS, "offsets are damaged"),
        (patch(18, b"\xff" * 8), TOKENS, "truncated"),
        (patch(34, struct.pack("<i", -3)), TOKENS, "length -3"),
        (patch(46, struct.pack("<q", 4)), TOKENS, "offsets are damaged"),
        (patch(70, struct.pack("<q", 1)), TOKENS, "document boundaries"),
        (patch(78, struct.pack("<q", 9)), TOKENS, "document boundaries"),
        (patch(86, struct.pack("<q", 2)), TOKENS, "document boundaries"),
        (INDEX, TOKENS[:-4], "has 20 bytes, but"),
        (INDEX, TOKENS + b"1234", "has 28 bytes, but"),
        (struct.pack("<9sQBQQq", b"MMIDIDX\x00\x00", 1, 4, 0, 1, 0), b"", "empty"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, index: bytes, tokens: bytes, says: str) -> None:
    prefix = put(tmp_path, index, tokens)
    config = DataConfig(data_path=(prefix,), tokenizer_type="NullTokenizer", vocab_size=100, split="1")
    with pytest.raises(UserError, match=says) as caught:
        build_datasets(config, 2, 1, (1, 0, 0))
    assert prefix in str(caught.value) and caught.value.field == "--data-path" and "Accepted" in str(caught.value)


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_half_a_pair_is_refused(tmp_path: Path, missing: str) -> None:
    prefix = put(tmp_path)
    Path(prefix + missing).unlink()
    with pytest.raises(UserError, match=f"no .*data{missing}"):
        is_indexed(prefix)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    def build(size: int, model: int | None = None) -> object:
        config = DataConfig(data_path=(put(tmp_path),), tokenizer_type="NullTokenizer", vocab_size=size, split="1")
        return build_datasets(config, 2, 1, (1, 0, 0), model)

    build(10)
    with pytest.raises(UserError, match="token id 10 in document 1 .*, but the vocabulary has 9 entries"):
        build(8)
    with pytest.raises(UserError, match="token id 10 in document 1 .*, but the vocabulary has 7 entries"):
        build(100, 7)


# ------------------------------------------------------------------------------------------- tools/preprocess_data.py


def lines(folder: Path, *records: object) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def run_preprocess(folder: Path, *more: str) -> int:
    words = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "out"), *more]
    return preprocess.program(words if "--tokenizer-type" in more else [*words, "--tokenizer-type", "ByteTokenizer"])


def documents_of(prefix: Path) -> list[list[int]]:
    store = open_indexed(str(prefix))
    return [store.tokens[a:b].tolist() for a, b in itertools.pairwise(store.offsets)]


def test_preprocess_writes_what_training_reads(tmp_path: Path) -> None:
    lines(tmp_path, *({"text": t, "title": t.upper()} for t in ("one", "", "zwölf", "three" * 20)))
    assert run_preprocess(tmp_path, "--append-eod", "--json-keys", "text", "title") == 0
    assert documents_of(tmp_path / "out_text_document") == [[*t.encode(), 256] for t in ("one", "zwölf", "three" * 20)]
    assert documents_of(tmp_path / "out_title_document")[0] == [*b"ONE", 256]
    config = DataConfig(data_path=(str(tmp_path / "out_text_document"),), tokenizer_type="ByteTokenizer", split="1")
    from_tokens = build_datasets(config, 16, 7, (9, 0, 0), log=lambda _: None).train
    config = DataConfig(data_path=(str(tmp_path / "in.jsonl"),), tokenizer_type="ByteTokenizer", split="1")
    from_text = build_datasets(config, 16, 7, (9, 0, 0), log=lambda _: None).train
    assert from_tokens is not None and from_text is not None
    for i in range(9):
        assert from_tokens[i].tokens.tolist() == from_text[i].tokens.tolist()
        assert from_tokens[i].documents.tolist() == from_text[i].documents.tolist()


def test_preprocess_gives_the_same_with_several_workers(tmp_path: Path) -> None:
    lines(tmp_path, *({"text": f"document {i} " * (i % 7)} for i in range(300)))
    assert run_preprocess(tmp_path) == 0
    alone = [(tmp_path / f"out_text_document{end}").read_bytes() for end in (".bin", ".idx")]
    assert run_preprocess(tmp_path, "--workers", "2") == 0
    assert [(tmp_path / f"out_text_document{end}").read_bytes() for end in (".bin", ".idx")] == alone


def bad_line(folder: Path) -> list[str]:
    (folder / "in.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    return []


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda f: ["--partitions", "4"], ["--partitions", "--workers N"]),
        (lambda f: ["--split-sentences"], ["--split-sentences"]),
        (lambda f: ["--workers", "0"], ["--workers = 0"]),
        (lambda f: ["--tokenizer-type", "Llama2Tokenizer"], ["--tokenizer-model", "Llama2Tokenizer needs this flag"]),
        (lambda f: ["--tokenizer-type", "HuggingFaceTokenizer"], ["--tokenizer-model"]),
        (lambda f: ["--json-keys", "body"], ["in.jsonl:1", "--json-keys = body", "text"]),
        (lambda f: ["--output-prefix", str(f / "no" / "out")], ["--output-prefix"]),
        (lambda f: ["--input", str(f / "none.jsonl")], ["--input", "none.jsonl", "no such file"]),
        (lambda f: ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], ["in.jsonl:1", "no token id"]),
        (bad_line, ["in.jsonl:2", "not JSON"]),
    ],
)
def test_preprocess_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Callable[[Path], list[str]], says: list[str]
) -> None:
    lines(tmp_path, {"text": "fine"})
    assert run_preprocess(tmp_path, *prepare(tmp_path)) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert all(part in message for part in says), message
    assert not list(tmp_path.glob("out*"))


def test_null_tokenizer_is_megatrons() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.decode(tokenizer.encode("5 99 0")) == "5 99 0"
