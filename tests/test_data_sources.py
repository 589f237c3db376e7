"""Where tokens come from: formats against bytes built by hand and against peers' readers, and what users get wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.data.corpus import find_corpus
from hetero_megatron.data.indexed import IndexedWriter, open_indexed, write_indexed
from hetero_megatron.data.open_source import open_source
from hetero_megatron.data.source import StoredSource
from hetero_megatron.data.streaming import StreamingDataset
from hetero_megatron.data.tokenizers import ByteTokenizer, NullTokenizer, Tokenizer, build_tokenizer
from hetero_megatron.errors import UserError
from tools import preprocess_data

BYTES = ByteTokenizer()
TEXTS = ["one", "", "zwei ä\n", "三 \x00", "x" * 3000, "end"]


def quiet(_: str) -> None:
    """No progress messages."""


def opened(path: Path | str, tokenizer: Tokenizer = BYTES, cache: Path | None = None, key: str = "text") -> StoredSource:
    return open_source(str(path), tokenizer, cache, key, quiet)


def documents(source: StoredSource) -> list[str]:
    return [BYTES.decode(source.document(i)) for i in range(source.num_documents)]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: t, "n": 1}) + "\n" for t in texts), encoding="utf-8")
    return path


def index_bytes(
    code: int = 4, lengths: tuple[int, ...] = (2, 3), starts: tuple[int, ...] = (0, 1, 2), version: int = 1, width: int = 4
) -> bytes:
    """An .idx file byte by byte, independent of the writer."""
    out = b"MMIDIDX\x00\x00" + struct.pack("<Q", version) + struct.pack("<B", code)
    out += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(starts))
    out += b"".join(struct.pack("<i", n) for n in lengths)
    out += b"".join(struct.pack("<q", sum(lengths[:i]) * width) for i in range(len(lengths)))
    return out + b"".join(struct.pack("<q", s) for s in starts)


# --- .bin/.idx ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, letter", [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")], ids="u1 i1 i2 i4 i8 u2".split()
)
def test_reads_bytes_built_by_hand(code: int, letter: str, tmp_path: Path) -> None:
    width = struct.calcsize(letter)
    (tmp_path / "d.idx").write_bytes(index_bytes(code, width=width))
    (tmp_path / "d.bin").write_bytes(struct.pack(f"<5{letter}", 7, 8, 9, 10, 11))
    source = opened(tmp_path / "d", NullTokenizer(100))
    assert [source.document(i).tolist() for i in range(source.num_documents)] == [[7, 8], [9, 10, 11]]
    assert source.document(0).dtype == np.int64 and source.lengths.tolist() == [2, 3] and source.num_tokens == 5


def test_a_document_of_several_sequences_and_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "d.idx").write_bytes(index_bytes(8, (2, 0, 3, 1), (0, 3, 3, 4), width=2))
    (tmp_path / "d.bin").write_bytes(struct.pack("<6H", *range(6)))
    source = opened(tmp_path / "d.bin", NullTokenizer(100))
    assert [source.document(i).tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [], [5]]


@pytest.mark.parametrize("dtype, code", [(np.uint8, 1), (np.int8, 2), (np.int16, 3), (np.int32, 4), (np.int64, 5), (np.uint16, 8)])
def test_writer_equals_bytes_built_by_hand_and_reads_back(dtype: type[np.generic], code: int, tmp_path: Path) -> None:
    written = [np.array(d) for d in ([1, 2], [], [3, 4, 127])]
    write_indexed(str(tmp_path / "w"), written, dtype)
    expected = index_bytes(code, (2, 0, 3), (0, 1, 2, 3), width=np.dtype(dtype).itemsize)
    assert (tmp_path / "w.idx").read_bytes() == expected
    assert (tmp_path / "w.bin").read_bytes() == np.array([1, 2, 3, 4, 127], dtype).tobytes()
    source = opened(tmp_path / "w", NullTokenizer(1000))
    assert [source.document(i).tolist() for i in range(3)] == [d.tolist() for d in written]
    assert source.read(2, 1, 3).tolist() == [4, 127] and source.read(2, 3, 3).tolist() == []
    for wrong in ((2, 1, 4), (3, 0, 0), (2, 2, 1), (-1, 0, 0)):
        with pytest.raises(IndexError):
            source.read(*wrong)


def test_has_eod_says_whether_documents_end_with_it(tmp_path: Path) -> None:
    write_indexed(str(tmp_path / "with"), [np.array([1, 256]), np.array([256])], np.uint16)
    write_indexed(str(tmp_path / "without"), [np.array([1, 256]), np.array([2])], np.uint16)
    assert opened(tmp_path / "with").has_eod and not opened(tmp_path / "without").has_eod


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedWriter(str(tmp_path / "w"), np.uint16) as writer:
        writer.add(np.array([1]))
        raise RuntimeError
    assert not list(tmp_path.iterdir())


# --- text --------------------------------------------------------------------------------------------------------


def test_text_jsonl_and_parquet_give_the_same_documents(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i}.txt").write_bytes(text.encode())
    lines = write_jsonl(tmp_path / "d.jsonl", TEXTS)
    table = datasets.Dataset.from_dict({"text": [*TEXTS, None], "other": ["no"] * (len(TEXTS) + 1)})
    table.to_parquet(tmp_path / "d.parquet")
    peer = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "hf"))["text"]
    expected = [t for t in TEXTS if t]
    assert [t for t in peer if t] == expected
    for path in (tmp_path / "texts", lines, tmp_path / "d.parquet"):
        source = opened(path)
        assert documents(source) == expected and not source.has_eod
        assert source.num_tokens == sum(len(t.encode()) for t in expected)


def test_blank_lines_byte_order_mark_and_another_key(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"body": "a"}\r\n\n  \n{"body": "b"}')
    assert documents(opened(tmp_path / "d.jsonl", key="body")) == ["a", "b"]


def test_globs_are_sorted_and_hidden_files_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden", "c.md"):
        (tmp_path / name).write_text(name)
    assert documents(opened(tmp_path)) == ["a.txt", "b.txt", "c.md"]
    assert documents(opened(tmp_path / "*.txt")) == ["a.txt", "b.txt"]


def test_stdlib_is_real_source_code_within_its_bound() -> None:
    source = opened("stdlib")
    assert 1_000_000 < source.num_tokens <= 8_000_000
    files = find_corpus("stdlib").files
    assert len(files) == source.num_documents > 100
    assert not [f for f in files if {"test", "idlelib", "site-packages"} & set(f.parts[-3:-1])]
    assert source.document(3).tolist() == list(files[3].read_bytes())
    assert opened("stdlib").fingerprint == source.fingerprint


def test_fingerprint_follows_content_and_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["1 2 3"])
    first = opened(path).fingerprint
    assert opened(path).fingerprint == first
    assert opened(path, NullTokenizer(10), tmp_path).fingerprint != first
    write_jsonl(path, ["1 2 3 4"])
    assert opened(path).fingerprint != first


# --- the cache of tokens -----------------------------------------------------------------------------------------


def _tokenise(path: str, cache: str) -> list[int]:
    source = open_source(path, NullTokenizer(1000), Path(cache), log=quiet)
    return [*source.lengths.tolist(), int(source.document(source.num_documents - 1).sum())]


def test_several_processes_may_fill_the_cache_at_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [" ".join(map(str, range(i % 50 + 1))) for i in range(3000)])
    work = [(str(path), str(tmp_path / "cache"))] * 6
    with get_context("fork").Pool(3) as pool:
        results = pool.starmap(_tokenise, work, chunksize=1)
    assert all(r == results[0] for r in results) and results[0][:3] == [1, 2, 3]
    assert sorted(f.suffix for f in (tmp_path / "cache").iterdir()) == [".bin", ".idx"]


def test_tokens_are_made_once(tmp_path: Path) -> None:
    path, said = write_jsonl(tmp_path / "d.jsonl", ["1 2", "3"]), []
    for _ in range(2):
        source = open_source(str(path), NullTokenizer(10), tmp_path / "cache", log=said.append)
        assert source.document(1).tolist() == [3]
    assert len(said) == 1 and str(path) in said[0]


# --- streaming ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_stream_goes_on_from_its_state(kind: str, tmp_path: Path) -> None:
    texts = [f"document {i} " * (i % 4 + 1) for i in range(40)]
    path = tmp_path / f"d.{kind}"
    if kind == "jsonl":
        write_jsonl(path, texts)
    else:
        pytest.importorskip("datasets").Dataset.from_dict({"text": texts}).to_parquet(path)
    stream = StreamingDataset(find_corpus(str(path)), BYTES, 64)
    flat = [i for _ in range(2) for t in texts for i in [*t.encode(), 256]]
    assert all(stream[i].tokens.tolist() == flat[i * 64 : i * 64 + 65] for i in range(20))
    state = json.loads(json.dumps(stream.state_dict(13)))
    again = StreamingDataset(find_corpus(str(path)), BYTES, 64)
    again.load_state_dict(state)
    for i in range(13, 25):
        assert again[i].tokens.tolist() == stream[i].tokens.tolist()
        assert again[i].documents.tolist() == stream[i].documents.tolist()


# --- tokenizers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small byte-level BPE tokenizer."""
    transformers = pytest.importorskip("transformers")
    from tokenizers.implementations import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["the cat sat on the mat, the cat"] * 20, vocab_size=300, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def test_hugging_face_and_gpt2_tokenizers(hugging_face: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(hugging_face))
    gpt2 = build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(hugging_face / "vocab.json"), merge_file=str(hugging_face / "merges.txt")
    )
    text = "the cat ate ä\n"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode()) and tokenizer.decode(ids) == text
    assert gpt2.encode(text).tolist() == ids.tolist() and gpt2.eod == tokenizer.eod == 0
    assert max(ids) < tokenizer.vocab_size == gpt2.vocab_size
    assert opened(write_jsonl(tmp_path / "d.jsonl", [text]), tokenizer, tmp_path).document(0).tolist() == ids.tolist()


def test_byte_and_null_tokenizers() -> None:
    assert (BYTES.vocab_size, BYTES.eod, BYTES.encode("ä").tolist()) == (257, 256, [0xC3, 0xA4])
    null = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (null.vocab_size, null.eod, null.encode("5 99").tolist(), null.decode([5, 9])) == (101, 100, [5, 99], "5 9")


# --- tools/preprocess_data.py ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", "2"])
def test_preprocess_data_writes_one_pair_per_key(workers: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"a": f"{i}" * 3, "b": "y"}) + "\n" for i in range(200)))
    words = ["--input", str(tmp_path / "d.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", workers]
    words += ["--json-keys", "a", "b", "--tokenizer-type", "NullTokenizer", "--vocab-size", "300000", "--append-eod"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"a": f"{i} 7", "b": "3"}) + "\n" for i in range(200)))
    assert preprocess_data.main(words) == 0
    a, b = (opened(tmp_path / f"out_{key}_document", NullTokenizer(300_000)) for key in "ab")
    assert a.has_eod and [a.document(i).tolist() for i in range(200)] == [[i, 7, 300_000] for i in range(200)]
    assert b.document(9).tolist() == [3, 300_000]
    assert (tmp_path / "out_a_document.idx").read_bytes()[17] == 4  # int32: the vocabulary exceeds 65,500


def test_preprocess_data_uses_two_bytes_for_small_vocabularies_and_no_eod_unless_asked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["ab", "c"])
    assert preprocess_data.main(f"--input {path} --output-prefix {tmp_path}/o --tokenizer-type ByteTokenizer".split()) == 0
    assert (tmp_path / "o_text_document.idx").read_bytes() == index_bytes(8, (2, 1), (0, 1, 2), width=2)
    assert (tmp_path / "o_text_document.bin").read_bytes() == struct.pack("<3H", *b"abc")


@pytest.mark.parametrize(
    "change, message",
    [
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--partitions", "2"], ["--partitions", "--workers"]),
        (["--workers", "0"], ["--workers", "0", ">= 1"]),
        (["--tokenizer-type", "Llama2Tokenizer"], ["--tokenizer-type", "Llama2Tokenizer", "HuggingFaceTokenizer"]),
        (["--json-keys", "body"], ["d.jsonl:1", "body", "text"]),
        (["--input", "/no/such"], ["--input", "/no/such"]),
        (["--output-prefix", "/no/such/o"], ["--output-prefix", "/no/such"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_preprocess_data_refuses(
    change: list[str], message: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["a"])
    words = f"--input {path} --output-prefix {tmp_path}/o --tokenizer-type ByteTokenizer".split() + change
    assert preprocess_data.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and all(part in error for part in message)
    assert [f.name for f in tmp_path.iterdir()] == ["d.jsonl"]  # no output, whole or in part


# --- what users get wrong ----------------------------------------------------------------------------------------


def pair(index: bytes, data: bytes = struct.pack("<5i", 1, 2, 3, 4, 5)) -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        (folder / "d.idx").write_bytes(index)
        (folder / "d.bin").write_bytes(data)
        return opened(folder / "d")

    return make


def file(name: str, content: bytes, key: str = "text", tokenizer: Tokenizer = BYTES) -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        (folder / name).write_bytes(content)
        return opened(folder / name, tokenizer, folder / "cache", key)

    return make


def without(end: str) -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        pair(index_bytes())(folder)
        (folder / f"d{end}").unlink()
        return opened(folder / "d")

    return make


def parquet(column: str, values: list[object]) -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        pytest.importorskip("datasets").Dataset.from_dict({column: values}).to_parquet(folder / "d.parquet")
        return opened(folder / "d.parquet")

    return make


def mixed(folder: Path) -> object:
    (folder / "a.txt").write_text("a")
    (folder / "b.jsonl").write_text("{}")
    return opened(folder)


def tokenizer(**flags: object) -> Callable[[Path], object]:
    return lambda folder: build_tokenizer(**flags)  # type: ignore[arg-type]


BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing file": (lambda folder: opened(folder / "nope"), ["--data-path", "nope", "no such file"]),
    "name too long": (lambda folder: opened("x" * 5000), ["--data-path", "xxx"]),
    "glob without match": (lambda folder: opened(folder / "*.txt"), ["--data-path", "*.txt", "no file"]),
    "empty folder": (opened, ["--data-path", "no files"]),
    "mixed folder": (mixed, ["--data-path", "jsonl", "text", "kind"]),
    "empty file": (file("d.txt", b""), ["--data-path", "d.txt", "empty"]),
    "only empty documents": (file("d.jsonl", b'{"text": ""}\n' * 3), ["--data-path", "d.jsonl", "empty"]),
    "blank jsonl": (file("d.jsonl", b"\n\n"), ["--data-path", "d.jsonl", "empty"]),
    "not utf-8": (file("d.txt", b"ab\xff"), ["d.txt", "UTF-8", "0xff"]),
    "jsonl not utf-8": (file("d.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'), ["d.jsonl:2"]),
    "bad json line": (file("d.jsonl", b'{"text": "a"}\n\n{"text": \n'), ["d.jsonl:3", "JSON"]),
    "json is no object": (file("d.jsonl", b"[1]\n"), ["d.jsonl:1", "object"]),
    "json nested too deeply": (file("d.jsonl", b'{"text": ' + b"[" * 100_000), ["d.jsonl:1"]),
    "lone surrogate": (file("d.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n'), ["d.jsonl"]),
    "missing key": (file("d.jsonl", b'{"body": "a"}\n'), ["d.jsonl:1", "text", "body"]),
    "value is no string": (file("d.jsonl", b'{"text": 5}\n'), ["d.jsonl:1", "text = 5", "string"]),
    "compressed": (file("d.jsonl.gz", b"\x1f\x8b"), ["d.jsonl.gz", "compressed"]),
    "not parquet": (file("d.parquet", b"hello"), ["d.parquet", "parquet"]),
    "no such column": (parquet("body", ["a"]), ["d.parquet", "text", "body"]),
    "column of numbers": (parquet("text", [1]), ["d.parquet", "text", "string"]),
    "words for NullTokenizer": (file("d.txt", b"one", tokenizer=NullTokenizer(9)), ["NullTokenizer", "one"]),
    "id out of range": (file("d.txt", b"1 9", tokenizer=NullTokenizer(9)), ["--vocab-size", "9", "0..8"]),
    "no .bin": (without(".bin"), ["--data-path", "d.bin", "both"]),
    "no .idx": (without(".idx"), ["--data-path", "d.idx", "both"]),
    "empty idx": (pair(b""), ["d.idx"]),
    "idx cut in the header": (pair(index_bytes()[:20]), ["d.idx", "truncated", "20", "34"]),
    "truncated idx": (pair(index_bytes()[:-1]), ["d.idx", "truncated", "81", "82"]),
    "idx too long": (pair(index_bytes() + b"abc"), ["d.idx", "too long"]),
    "multimodal": (pair(index_bytes() + b"\0\0"), ["d.idx", "mode"]),
    "wrong magic": (pair(b"NOTANIDX!" + index_bytes()[9:]), ["d.idx", "NOTANIDX!", "MMIDIDX"]),
    "version 2": (pair(index_bytes(version=2)), ["d.idx", "version 2"]),
    "unknown dtype": (pair(index_bytes(code=9)), ["d.idx", "code 9"]),
    "float tokens": (pair(index_bytes(code=7)), ["d.idx", "float32"]),
    "negative length": (pair(index_bytes(lengths=(7, -2))), ["d.idx", "-2"]),
    "offsets damaged": (pair(index_bytes(width=2)), ["d.idx", "offsets"]),
    "documents out of order": (pair(index_bytes(starts=(0, 2, 1))), ["d.idx", "document"]),
    "no documents": (pair(index_bytes(lengths=(), starts=(0,)), b""), ["d", "empty"]),
    "bin too short": (pair(index_bytes(), b"\0" * 16), ["d.bin", "16", "20"]),
    "bin too long": (pair(index_bytes(), b"\0" * 24), ["d.bin", "24", "20"]),
    "huge counts": (pair(index_bytes()[:18] + b"\xff" * 16 + index_bytes()[34:]), ["d.idx", "truncated"]),
    "unknown tokenizer": (tokenizer(type="NoTokenizer"), ["--tokenizer-type", "NoTokenizer", "ByteTokenizer"]),
    "refused tokenizer": (tokenizer(type="SentencePieceTokenizer"), ["SentencePieceTokenizer", "HuggingFaceTokenizer"]),
    "BERT's tokenizer": (tokenizer(type="BertWordPieceCase"), ["--tokenizer-type", "BertWordPieceCase", "GPT"]),
    "no vocabulary size": (tokenizer(type="NullTokenizer"), ["--vocab-size"]),
    "no tokenizer model": (tokenizer(type="HuggingFaceTokenizer"), ["--tokenizer-model"]),
    "no such tokenizer": (tokenizer(type="HuggingFaceTokenizer", model="/no/such"), ["--tokenizer-model", "/no/such"]),
    "no vocabulary file": (
        tokenizer(type="GPT2BPETokenizer", vocab_file="/no/v.json", merge_file="/no/m"), ["--vocab-file", "/no/v.json"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, tmp_path: Path) -> None:
    make, parts = BAD[name]
    with pytest.raises(UserError) as caught:
        make(tmp_path)
    message = str(caught.value)
    assert not [part for part in parts if part not in message], message
    assert "\n" not in message and len(message) < 600


def test_a_folder_is_no_hugging_face_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match="--tokenizer-model") as caught:
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_what_was_checked_on_opening_is_the_data_that_is_read(tmp_path: Path) -> None:
    write_indexed(str(tmp_path / "d"), [np.arange(5)], np.int32)
    store = open_indexed(str(tmp_path / "d"))
    assert store.num_tokens == 5 and store.num_documents == 1 and not store.tokens.flags.writeable
