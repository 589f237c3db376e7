"""Tokenizers with gaps, without an end of document or longer than the model; kinds of parquet; damaged files."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.cli import preprocess
from hetero_megatron.data import DataConfig, build_datasets, build_tokenizer
from hetero_megatron.data.corpus import may_have_keys
from hetero_megatron.data.folder import one_kind
from hetero_megatron.data.indexed import open_indexed, write_indexed
from hetero_megatron.data.sources import parquet
from hetero_megatron.errors import UserError

TEXTS = [f"the quick brown fox {i} jumps" for i in range(40)]


def quiet(_: str) -> None:
    """No progress messages."""


def save_tokenizer(folder: Path, eos: str | None = "<eos>", extra: dict[str, int] | None = None) -> Path:
    """A small byte-level BPE tokenizer; ``extra``: special tokens with ids of their own."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos).save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for token, number in (extra or {}).items():
        content["model"]["vocab"][token] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": number, "content": token, "special": True, **flags})
    path.write_text(json.dumps(content))
    return folder


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def build(path: Path, tokenizer: Path, rows: int | None, loader: str = "single", **more: object) -> np.ndarray:
    """All tokens of the first samples."""
    config = DataConfig(
        data_path=(str(path),), split="1", tokenizer_model=str(tokenizer), dataloader_type=loader,
        data_cache_path=str(path.parent / f"cache-{loader}"), **more,  # type: ignore[arg-type]
    )  # fmt: skip
    built = build_datasets(config, 16, 1, (20, 0, 0), rows, quiet)
    assert built.train is not None
    return np.concatenate([built.train[i].tokens for i in range(20)])


# --- tokenizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [281, 310, 4095])
def test_the_largest_id_counts_and_not_the_number_of_tokens(largest: int, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "t", extra={"<end>": largest})
    path = write_lines(tmp_path / "c.jsonl", [f"{text}<end>" for text in TEXTS])
    ours = build_tokenizer("HuggingFaceTokenizer", str(tokenizer))
    assert ours.vocab_size == largest + 1 and ours.encode("a<end>")[-1] == largest
    for loader in ("single", "streaming"):
        assert build(path, tokenizer, largest + 1, loader).max() == largest
        place = "document 0" if loader == "single" else "c.jsonl:1"  # the first is cached, in stored documents
        with pytest.raises(UserError, match=rf"token id {largest} in .*{place}.*the vocabulary has {largest:,} ent"):
            build(path, tokenizer, largest, loader, json_keys="text")


def test_ids_that_do_not_occur_need_no_rows(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "t", extra={"<pad>": 290, "<image>": 291})
    path = write_lines(tmp_path / "c.jsonl", TEXTS)
    assert build(path, tokenizer, 281).max() < 281
    prefix = str(tmp_path / "ids")
    write_indexed(prefix, [np.arange(30, dtype=np.uint16), np.full(30, 285, np.uint16)], np.uint16)
    build(Path(prefix), tokenizer, 300)  # ids of padding rows are legal
    with pytest.raises(UserError, match=r"token id 285 in document 1 \(counted from 0\)"):
        build(Path(prefix), tokenizer, 285)


def test_without_an_end_of_document_only_what_needs_it_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "t", eos=None)
    write_lines(tmp_path / "c.jsonl", TEXTS)
    words = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", str(tmp_path / "c"), "--tokenizer-model",
    str(tokenizer)]
    assert preprocess.program([*words, "--append-eod"]) == 2
    assert preprocess.program(words) == 0
    prefix = tmp_path / "c_text_document"
    assert len(build(prefix, tokenizer, 281))
    for wrong in ({"eod_mask_loss": True}, {"data": "c.jsonl"}):
        data = tmp_path / str(wrong.pop("data", prefix.name))
        with pytest.raises(UserError, match="has no end-of-sequence token"):
            build(data, tokenizer, 281, **wrong)
    files = {"vocab.json": {"a": 0, "b": 1}, "merges.txt": None}
    for name, content in files.items():
        (tmp_path / name).write_text("#version: 0.2\n" if content is None else json.dumps(content))
    made = build_tokenizer("GPT2BPETokenizer", None, str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert made.eod is None and made.vocab_size == 2


@pytest.mark.parametrize("first", [b"\n\x0e\n\x05<unk>", b"IQ== 0\nIg== 1\n"])
def test_a_model_file_that_needs_a_package_says_which(first: bytes, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name = "sentencepiece" if first.startswith(b"\n") else "tiktoken"
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    (tmp_path / "tokenizer.model").write_bytes(first)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(UserError, match=rf"transformers needs {name}.*hetero-megatron\[sentencepiece\]"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": "{}"}, "the directory holds no tokenizer"),
        ({"tekken.json": "{}"}, "tekken.json and no tokenizer.json"),
        ({"tokenizer.json": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, "git lfs pull"),
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["a.B"]}}', "a.py": ""}, "--trust-remote-code"),
    ],
)
def test_directories_without_a_tokenizer_that_is_read_say_why(files: dict[str, str], says: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


TOKENIZER_DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a FIFO": ("tokenizer.json", fifo, "FIFO"),
    "a device": ("vocab.json", device, "device"),
    "a FIFO of another name": ("special_tokens_map.json", fifo, "FIFO"),
    "deep": ("tokenizer.json", text("[" * 1000 + "]" * 1000), "nested too deeply"),
    "digits": ("added_tokens.json", text('{"a": ' + "9" * 6000 + "}"), "6,000 digits"),
    "a surrogate": ("tokenizer_config.json", text('{"eos_token": "\\ud800"}'), "surrogate"),
    "a list": ("tokenizer.json", text("[]"), "not a JSON object"),
    "no tokenizer": ("tokenizer.json", text("{}"), "cannot|without a tokenizer"),
}


@pytest.mark.parametrize("name", TOKENIZER_DAMAGE)
def test_damaged_tokenizer_files_are_refused(name: str, tmp_path: Path) -> None:
    file, damage, says = TOKENIZER_DAMAGE[name]
    folder = save_tokenizer(tmp_path / "t")
    damage(folder / file)
    with pytest.raises(UserError, match=says) as caught:
        build_tokenizer("HuggingFaceTokenizer", str(folder))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("word", ["9" * 23, "9" * 5000, "٣", "1_0", "0x1", "1.0", "-"])
def test_words_that_are_no_ids_are_refused(word: str) -> None:
    with pytest.raises(UserError, match="no token id"):
        build_tokenizer("NullTokenizer", vocab_size=100).encode(f"1 2 {word} 3")


@pytest.mark.parametrize("bad", [-1, 2**31, "x", True, 10**30])
def test_ids_of_a_vocabulary_are_ids(bad: object, tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(json.dumps({"a": 0, "<|endoftext|>": bad}))
    (tmp_path / "m.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match="--vocab-file|--merge-file"):
        build_tokenizer("GPT2BPETokenizer", None, str(tmp_path / "v.json"), str(tmp_path / "m.txt"))


# --- parquet -----------------------------------------------------------------------------------------------------


def test_every_kind_of_string_column_and_empty_parts(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    words = [*TEXTS[:7], "é漢", ""]
    nested = pa.array([{"text": "no"}] * len(words))
    columns = {
        "plain": pa.array(words), "large": pa.array(words, pa.large_string()),
        "view": pa.array(words, pa.string_view()),
        "categories": pa.array(words).dictionary_encode(), "nulls": pa.array([w or None for w in words]),
    }  # fmt: skip
    for name, column in columns.items():
        table = pa.table({"meta": nested, "text": column, "n": list(range(len(words)))})
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", table.schema) as writer:
            for part in (table[:0], table[:4], table[4:4], table[4:], table[:0]):
                writer.write_table(part)
        read = list(parquet.read(tmp_path / f"{name}.parquet", "text", ()))
        assert [document for document, _ in read] == words, name
        for cut, (_, position) in itertools.islice(enumerate(read), 0, None, 3):
            assert list(parquet.read(tmp_path / f"{name}.parquet", "text", position)) == read[cut + 1 :]
    pq.write_table(pa.table({"text": pa.nulls(3)}), tmp_path / "none.parquet")
    assert [document for document, _ in parquet.read(tmp_path / "none.parquet", "text", ())] == [""] * 3


@pytest.mark.parametrize("kind", ["bytes", "lists", "numbers", "structs", "twice"])
def test_other_columns_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    values = {"bytes": [b"raw"], "lists": [["a"]], "numbers": [1], "structs": [{"a": "b"}]}
    table = pa.table([["a"], ["b"]], ["text", "text"]) if kind == "twice" else pa.table({"text": values[kind]})
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(UserError, match="not of strings|one name") as caught:
        list(parquet.read(tmp_path / "d.parquet", "text", ()))
    assert caught.value.field == "--json-keys"


def test_a_damaged_parquet_file_is_refused_in_our_words(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, compression="snappy")
    good = path.read_bytes()
    for damaged in (good[:-5], good[len(good) // 2 :], b"PAR1" + bytes(200) + good[-100:],
    good[:10] + b"\xff" * 30 + good[40:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read as parquet: it is damaged"):
            list(parquet.read(path, "text", ()))


@pytest.mark.parametrize("name", ["d.jsonl", "D.JSONL", "D.Parquet", "d.json.gz", "d.arrow"])
def test_capitals_do_not_change_a_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert may_have_keys(str(tmp_path / name)) and one_kind([tmp_path / name], name, "--data-path") != "text"


# --- other files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ['{"text": "cut o', '{"text": "a"} x', '{"body": "a"}', "[1]", '{"text": 5}'])
def test_a_stream_looks_at_its_last_line_first(end: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", TEXTS * 3)
    path.write_text(path.read_text() + end)
    config = DataConfig(data_path=(str(path),), split="1", dataloader_type="streaming")
    with pytest.raises(UserError, match=r"c.jsonl: last line"):
        build_datasets(config, 8, 1, (1, 0, 0), log=quiet)


def test_an_index_whose_boundaries_overflow_is_refused(tmp_path: Path) -> None:
    prefix = str(tmp_path / "d")
    write_indexed(prefix, [np.arange(5, dtype=np.uint16)] * 4, np.uint16)
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    assert open_indexed(prefix).num_documents == 4
    for values in ((2**63 - 1, -5, 3), (-1, 2, 3), (9, 9, 9)):
        raw[-32:-8] = np.array(values, "<i8").tobytes()
        (tmp_path / "d.idx").write_bytes(raw)
        with pytest.raises(UserError, match="document boundaries"):
            open_indexed(prefix)


@pytest.mark.parametrize("make", [fifo, device])
@pytest.mark.parametrize("name", ["c.txt", "c.jsonl", "c.parquet", "d.idx", "d.bin"])
def test_what_is_no_regular_file_is_refused_at_once(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    write_indexed(str(tmp_path / "d"), [np.arange(50, dtype=np.uint16)], np.uint16)
    make(tmp_path / name)
    path = tmp_path / ("d" if name.startswith("d") else name)
    config = DataConfig(data_path=(str(path),), split="1", tokenizer_type="NullTokenizer", vocab_size=99)
    with pytest.raises(UserError):
        build_datasets(config, 8, 1, (1, 0, 0), log=quiet)


# --- preprocess_data.py ------------------------------------------------------------------------------------------


def test_preprocess_counts_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "c.jsonl", [*TEXTS, "", "", ""])
    words = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", str(tmp_path / "c"), "--log-interval", "20"]
    assert preprocess.program([*words, "--tokenizer-type", "ByteTokenizer"]) == 0
    progress, _, last = capsys.readouterr().out.strip().splitlines()
    written = open_indexed(str(tmp_path / "c_text_document"))
    assert written.num_documents == len(TEXTS)
    size = written.num_tokens
    prefix = f"{tmp_path / 'c'}_text_document"
    assert last == f"wrote 40 documents, 3 empty ones left out, {size:,} tokens (uint16): {prefix}"
    assert "read: 20 documents" in progress and "ETA" in progress and 40 < int(progress.partition("%")[0]) < 60


def test_preprocess_shows_progress_by_time() -> None:
    counts = preprocess.Counts(1000, 10**9)
    counts.add([5, 0], 250)
    line = counts.progress(250, 60.0)
    assert "25% read: 1 document, 5 tokens" in line and line.endswith("60 s so far, ETA 3 min 00 s")
    assert counts.summary(2) == "1 document in 2 outputs, 1 empty one left out, 5 tokens"


@pytest.mark.parametrize("flag", ["--vocab-file", "--merge-file", "--tokenizer-model", "--vocab-size"])
def test_preprocess_refuses_what_its_tokenizer_does_not_read(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "c.jsonl", TEXTS)
    words = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", str(tmp_path / "c"), flag, "9"]
    assert preprocess.program([*words, "--tokenizer-type", "ByteTokenizer"]) == 2
    assert f"{flag} = 9: ByteTokenizer does not read it" in capsys.readouterr().err
