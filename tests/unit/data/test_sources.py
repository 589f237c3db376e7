"""Text -> tokens: every kind of file against a peer's reader, tokenizers, the cache, and what users get wrong."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from hetero_megatron.data.config import build_tokenizer
from hetero_megatron.data.corpus import find_corpus
from hetero_megatron.data.indexed import TokenStore
from hetero_megatron.data.tokenize import tokenize
from hetero_megatron.data.tokenizers import ByteTokenizer, NullTokenizer, Tokenizer
from hetero_megatron.errors import UserError

BYTES = ByteTokenizer()
TEXTS = ["one", "", "zwei ä\n", "三 \x00", "x" * 3000, "end"]


def quiet(_: str) -> None:
    """No progress messages."""


def opened(path: Path | str, tokenizer: Tokenizer = BYTES, cache: Path | None = None, key: str = "text") -> TokenStore:
    return tokenize(find_corpus(str(path), key), tokenizer, None if cache is None else str(cache), quiet)


def tokens(store: TokenStore) -> list[list[int]]:
    """Per document, without the end of document that each must have."""
    found = [store.tokens[a:b].tolist() for a, b in itertools.pairwise(store.offsets)]
    assert len({document[-1] for document in found}) == 1
    return [document[:-1] for document in found]


def documents(store: TokenStore) -> list[str]:
    return [BYTES.decode(ids) for ids in tokens(store)]


def write_jsonl(path: Path, texts: list[str], n: object = 1) -> Path:
    path.write_text("".join(json.dumps({"text": t, "n": n}) + "\n" for t in texts), encoding="utf-8")
    return path


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
        store = opened(path)
        assert documents(store) == expected
        assert store.num_tokens == sum(len(t.encode()) + 1 for t in expected)


def test_blank_lines_byte_order_mark_and_another_key(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"body": "a"}\r\n\n  \n{"body": "b"}')
    assert documents(opened(tmp_path / "d.jsonl", key="body")) == ["a", "b"]


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_hold_the_same_documents(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    plain, pack = write_jsonl(tmp_path / "d.jsonl", TEXTS).read_bytes(), PACKERS[suffix]
    for number in range(2):
        name = f"{number}.jsonl{suffix}"
        (tmp_path / "lines" / (name if number else name.upper())).write_bytes(pack(plain))
    (tmp_path / f"d.txt{suffix}").write_bytes(pack(b"a text"))
    assert documents(opened(tmp_path / "lines")) == 2 * [t for t in TEXTS if t]
    assert documents(opened(tmp_path / f"d.txt{suffix}")) == ["a text"]
    corpus = find_corpus(str(tmp_path / "lines"))
    corpus.check_ends()
    read = list(corpus.documents())
    for i, (_, cursor) in enumerate(read):  # a stream goes on from any place
        assert list(corpus.documents(cursor)) == read[i + 1 :]
        assert corpus.bytes_before(cursor) <= corpus.num_bytes()


def test_a_byte_order_mark_is_no_text_and_null_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbfa")
    (tmp_path / "d.jsonl").write_text('{"text": null}\n{"text": "a"}\n')
    assert documents(opened(tmp_path / "d.txt")) == documents(opened(tmp_path / "d.jsonl")) == ["a"]


def test_globs_are_sorted_and_hidden_files_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden", "c.md"):
        (tmp_path / name).write_text(name)
    assert documents(opened(tmp_path)) == ["a.txt", "b.txt", "c.md"]
    assert documents(opened(tmp_path / "*.txt")) == ["a.txt", "b.txt"]


@pytest.mark.slow
def test_stdlib_is_real_source_code_within_its_bound() -> None:
    store = opened("stdlib")
    files = [f for f in find_corpus("stdlib").files if f.stat().st_size]
    assert 1_000_000 < store.num_tokens - store.num_documents <= 8_000_000
    assert len(files) == store.num_documents > 100
    assert not [f for f in files if {"test", "idlelib", "site-packages"} & set(f.parts[-3:-1])]
    read = tokens(store)
    assert all(bytes(read[i]) == files[i].read_bytes() for i in range(0, len(files), 50))
    assert opened("stdlib").identity == store.identity


def test_identity_follows_content_key_and_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["1 2 3"], n="4 5")
    found = [opened(path), opened(path, key="n"), opened(path, NullTokenizer(10), tmp_path / "cache")]
    assert opened(path).identity == found[0].identity
    write_jsonl(path, ["1 2 3 4"])
    assert len({store.identity for store in [*found, opened(path)]}) == 4


# --- the cache of tokens -----------------------------------------------------------------------------------------


def _tokenize(path: str, cache: str) -> list[list[int]]:
    return tokens(opened(path, NullTokenizer(1000), Path(cache)))


@pytest.mark.slow
def test_several_processes_may_fill_the_cache_at_once(tmp_path: Path) -> None:
    expected = [[*range(i % 50 + 1)] for i in range(2000)]
    path = write_jsonl(tmp_path / "d.jsonl", [" ".join(map(str, ids)) for ids in expected])
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        work = [pool.submit(_tokenize, str(path), str(tmp_path / "cache")) for _ in range(6)]
    assert all(w.result() == expected for w in work)
    assert sorted(f.suffix for f in (tmp_path / "cache").iterdir()) == [".bin", ".idx"]


def test_tokens_are_made_once_and_damage_is_noticed(tmp_path: Path) -> None:
    path, said = write_jsonl(tmp_path / "d.jsonl", ["1 2", "3"]), list[str]()
    corpus = find_corpus(str(path))
    for _ in range(2):
        assert tokens(tokenize(corpus, NullTokenizer(10), str(tmp_path / "cache"), said.append)) == [[1, 2], [3]]
    assert len(said) == 1 and str(path) in said[0]
    (stored,) = (tmp_path / "cache").glob("*.bin")
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(UserError, match=stored.stem):
        opened(path, NullTokenizer(10), tmp_path / "cache")


def test_a_corpus_that_fails_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["1", "two"])
    with pytest.raises(UserError, match="d.jsonl:2.*NullTokenizer"):
        opened(path, NullTokenizer(9), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


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
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
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
    assert tokens(opened(write_jsonl(tmp_path / "d.jsonl", [text]), tokenizer, tmp_path)) == [ids.tolist()]


def test_byte_and_null_tokenizers() -> None:
    assert (BYTES.vocab_size, BYTES.eod, BYTES.encode("ä").tolist()) == (257, 256, [0xC3, 0xA4])
    null = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (null.vocab_size, null.eod, null.encode("5 99").tolist(), null.decode([5, 9])) == (101, 100, [5, 99], "5 9")


# --- what users get wrong ----------------------------------------------------------------------------------------


def file(name: str, content: bytes, key: str = "text", tokenizer: Tokenizer = BYTES) -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        (folder / name).write_bytes(content)
        return opened(folder / name, tokenizer, folder / "cache", key)

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
    "empty path": (lambda folder: opened(""), ["--data-path", "empty"]),
    "unknown home": (lambda folder: opened("~no-such-user/d.txt"), ["--data-path", "~no-such-user"]),
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
    "lone surrogate": (file("d.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n'), ["d.jsonl:2", "surrogate"]),
    "missing key": (file("d.jsonl", b'{"body": "a"}\n'), ["d.jsonl:1", "text", "body"]),
    "value is no string": (file("d.jsonl", b'{"text": 5}\n'), ["d.jsonl:1", "text = 5", "string"]),
    "only nulls": (file("d.jsonl", b'{"text": null}\n'), ["d.jsonl", "empty"]),
    "nothing but conversations": (
        file("d.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n'), ["d.jsonl:1", "finetune"],
    ),
    "no key of text": (file("d.jsonl", b'{"data": {"text": "a"}}\n'), ["d.jsonl:1", "a key that holds text", "data"]),
    "a list": (file("d.json", b'[\n {"text": "a"}\n]\n'), ["d.json:1", "one JSON object per line", "'.[]'"]),
    "indented objects": (file("d.json", b'{\n "text": "a"\n}\n'), ["d.json:1", "one JSON object per line", "jq -c ."]),
    "an archive": (file("d.tar.gz", gzip.compress(b"a")), ["d.tar.gz", ".tar"]),
    "zstd": (file("d.jsonl.zst", b"a"), ["d.jsonl.zst", ".gz"]),
    "cut off gzip": (file("d.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9]), ["d.jsonl.gz", "cut off"]),
    "no gzip": (file("d.txt.gz", b"text"), ["d.txt.gz", "damaged"]),
    "cut off xz": (file("d.txt.xz", lzma.compress(b"a" * 99)[:-9]), ["d.txt.xz", "cut off"]),
    "not parquet": (file("d.parquet", b"hello"), ["d.parquet", "parquet", "Accepted"]),
    "no such column": (parquet("body", ["a"]), ["d.parquet", "text", "body"]),
    "column of numbers": (parquet("text", [1]), ["d.parquet", "text", "string"]),
    "words for NullTokenizer": (file("d.txt", b"one", tokenizer=NullTokenizer(9)), ["d.txt", "NullTokenizer", "one"]),
    "id out of range": (file("d.txt", b"1 10", tokenizer=NullTokenizer(9)), ["--vocab-size", "10", "0..8"]),
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
