"""Folders as data sets are handed out: what is beside the data is left out and named; what is unclear is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_megatron.cli import preprocess
from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.chat.records import find_records
from hetero_megatron.data.corpus import find_corpus
from hetero_megatron.data.sources import arrow
from hetero_megatron.errors import UserError

LINE = '{"text": "a line"}\n'
BESIDE = (
    ".gitattributes", "README.md", "LICENSE", "LICENSE-CC-BY.txt", "dataset_infos.json", ".cache/x.json", "_SUCCESS",
    "figures/curve.png",
)  # fmt: skip


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(LINE if name.endswith((".jsonl", ".parquet", ".arrow")) else "{}")
    return folder


def names(folder: Path) -> list[str]:
    return [f.relative_to(folder).as_posix() for f in find_corpus(str(folder)).files]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_side_files_are_left_out_and_named(suffix: str, tmp_path: Path) -> None:
    data = [f"data/train-0000{i}-of-00002.{suffix}" for i in range(2)]
    fill(tmp_path, *data, *BESIDE)
    corpus = find_corpus(str(tmp_path))
    assert names(tmp_path) == data and corpus.kind == suffix.removesuffix(".gz")
    notice = corpus.notice()
    assert notice and "LICENSE, LICENSE-CC-BY.txt, README.md, _SUCCESS, dataset_infos.json, curve.png" in notice


def test_the_run_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "set", "c.jsonl", *BESIDE)
    said: list[str] = []
    for loader in ("single", "streaming"):
        config = DataConfig(data_path=(str(tmp_path / "set"),), split="1", dataloader_type=loader)
        build_datasets(config, 4, 1, (1, 0, 0), log=said.append)
    assert sum("not read: LICENSE" in line for line in said) == 2
    assert find_records(str(tmp_path / "set"), "--data-path").notice in said
    words = ["--input", str(tmp_path / "set"), "--output-prefix", str(tmp_path / "o")]
    words += ["--tokenizer-type", "ByteTokenizer"]
    assert preprocess.program(words) == 0 and "not read: LICENSE" in capsys.readouterr().out


def test_a_folder_of_texts_is_all_documents(tmp_path: Path) -> None:
    fill(tmp_path, "README.md", "LICENSE", "guide.md", ".hidden")
    assert names(tmp_path) == ["LICENSE", "README.md", "guide.md"] and find_corpus(str(tmp_path)).notice() is None


UNCLEAR: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "a script": (("a.jsonl", "b.jsonl", "load.py"), ["jsonl: a.jsonl and 1 more", "text: load.py", "'{}/**/*.jsonl'"]),
    "two kinds": (("a.jsonl", "sub/b.parquet", "README.md"), ["jsonl: a.jsonl", "parquet: b", "'{}/**/*.jsonl'"]),
    "only companions": (("dataset_infos.json", ".gitattributes"), ["holds no files but dataset_infos.json"]),
    "a table": (("data.csv",), [".csv files are tables", "data.csv", "read_csv(sys.argv[1])", "data.jsonl"]),
    "a packed table": (("data.tsv.gz",), [".tsv files are tables", 'sys.argv[1], sep="\\t")', "data.tsv.gz data.j"]),
    "a table beside records": (("a.jsonl", "b.csv"), ["jsonl: a.jsonl; table: b.csv", "'{}/**/*.jsonl'"]),
    "token files": (("a_text_document.idx", "a_text_document.bin"), ["pairs of .bin and .idx", "{}/a_text_document"]),
    "an archive": (("a.jsonl", "b.jsonl.zst"), [".zst files are not unpacked here", "zstd -d"]),
    "shards of splits": (
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"),
        ["several splits", "--train-data-path '{}/data/train*'", "--test-data-path '{}/data/test-00000-of-0"],
    ),
    "shards of two training splits": (
        ("train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"),
        ["several splits", "one of '{}/train_gen-00000-of-00001.jsonl', '{}/train_sft-00000"],
    ),
    "folders of splits": (
        ("train/a.jsonl", "train/b.jsonl", "validation/a.jsonl", "README.md"),
        ["several splits", "--train-data-path '{}/train' --valid-data-path '{}/validation'"],
    ),
    "splits in folders of languages": (
        ("en/train.jsonl", "de/train.jsonl", "en/test.jsonl"),
        ["--train-data-path '{}/**/train.jsonl' --test-data-path '{}/en/test.jsonl', or"],
    ),
    "shards in folders of languages": (
        ("en/train-1.jsonl", "de/train-2.jsonl", "en/test.jsonl"), ["--train-data-path '{}/**/train-*' --test"],
    ),
    "folders of splits below others": (
        ("en/train/a.jsonl", "de/train/b.jsonl", "en/test/a.jsonl"), ["--train-data-path '{}/**/train/*' --test"],
    ),
    "splits of nothing in common": (
        ("a/x.train.jsonl", "b/y.train.jsonl", "a/x.test.jsonl"),
        ["--train-data-path '{}/a/x.train.jsonl' '{}/b/y.train.jsonl' --test"],
    ),
    "numbered splits": (("train1.jsonl", "train2.jsonl", "test1.jsonl"), ["--train-data-path '{}/train*' --test-data"]),
    "sets": (("trainset.jsonl", "devset.jsonl", "testset.jsonl"), ["{}/trainset", "--valid-data-path '{}/devset"]),
    "what is held out": (("train.jsonl", "holdout.jsonl"), ["--test-data-path '{}/holdout.jsonl'"]),
    "texts of splits": (("wiki.train.txt", "wiki.test.txt"), ["several splits", "--test-data-path '{}/wiki.test.txt'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_folder_that_is_not_clear_is_refused_with_a_path_that_is(name: str, tmp_path: Path) -> None:
    files, says = UNCLEAR[name]
    fill(tmp_path, *files)
    with pytest.raises(UserError) as caught:
        find_corpus(str(tmp_path))
    assert not [part for part in says if part.replace("{}", str(tmp_path)) not in str(caught.value)], caught.value


@pytest.mark.parametrize(
    "files",
    [("train-00000-of-00001.jsonl",), ("en/train.jsonl", "fr/train.jsonl"), ("tests/test_a.py", "train.py", "x.py"),
     ("books-00000-of-00001.jsonl", "wiki-00000-of-00001.jsonl"), ("contest.jsonl", "trainer.jsonl")],
)  # fmt: skip
def test_names_that_are_no_splits_are_read(files: tuple[str, ...], tmp_path: Path) -> None:
    assert names(fill(tmp_path, *files)) == sorted(files)


def test_tables_among_texts_are_texts(tmp_path: Path) -> None:
    assert find_corpus(str(fill(tmp_path, "a.md", "b.csv"))).kind == "text"


@pytest.mark.parametrize(
    ("path", "says"),
    [("https://x.org/a.jsonl", "downloaded first"), ("hub:o/set:train", "hf download --repo-type dataset o/set")],
)
def test_data_that_are_elsewhere(path: str, says: str) -> None:
    with pytest.raises(UserError, match=f"no such file or folder.*{says}"):
        find_corpus(path)
    with pytest.raises(UserError, match="hub:owner/set for a data set of"):
        find_records("owner/set", "--data-path")


@pytest.mark.parametrize("name", ["c.jsonl", "c.txt", "c.parquet", "c.arrow"])
def test_a_pointer_of_git_lfs_is_no_data(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(UserError, match=f"{name}: it is a pointer of Git LFS.*git lfs pull"):
        find_corpus(str(tmp_path))


def test_a_glob_of_several_splits_is_taken_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path, "train.jsonl", "test.jsonl", "README.md")
    assert len(find_corpus(str(tmp_path / "*.jsonl")).files) == 2


def test_preprocess_and_splits_of_their_own_name_their_flags(tmp_path: Path) -> None:
    fill(tmp_path, "train.jsonl", "test.jsonl")
    for field in ("--input", "--valid-data-path"):
        with pytest.raises(UserError, match=rf"{field} = .*several splits.* one of '\S+train.jsonl', '\S+test"):
            find_corpus(str(tmp_path), field=field)


# --- datasets' save_to_disk --------------------------------------------------------------------------------------


def test_what_save_to_disk_wrote_is_read_as_datasets_reads_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"text {i}", "messages": [{"role": "user", "content": f"é{i}"}]} for i in range(2500)]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "set", num_shards=2)
    corpus = find_corpus(str(tmp_path / "set"))
    assert corpus.kind == "arrow" and len(corpus.files) == 2
    assert "dataset_info.json, state.json" in (corpus.notice() or "")
    read = list(corpus.documents())
    assert [text for text, _ in read] == data["text"][:]
    for cut in (0, 999, 1000, 1249, 1250, 2499):
        assert list(corpus.documents(read[cut][1])) == read[cut + 1 :]
    found = find_records(str(tmp_path / "set"), "--data-path")
    assert [record.value for record in found.read()] == rows
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    with pytest.raises(UserError, match=r"several splits.*--train-data-path '\S+/splits/train'"):
        find_corpus(str(tmp_path / "splits"))


def test_caches_of_datasets_beside_its_data_are_left_out(tmp_path: Path) -> None:
    data = ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    caches = ("cache-0123456789abcdef.arrow", "cache-0123456789abcdef_00000_of_00002.arrow", "mapped.arrow")
    fill(tmp_path, *data, *caches)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in data]}))
    assert names(tmp_path) == list(data)
    notice = find_corpus(str(tmp_path)).notice() or ""
    assert not [name for name in (*caches, "state.json") if name not in notice], notice
    for state in ("{", "[]", '{"_data_files": [{}]}', '{"_data_files": null}'):
        (tmp_path / "state.json").write_text(state)
        assert names(tmp_path) == [*data, "mapped.arrow"]
    (tmp_path / "state.json").unlink()
    assert names(tmp_path) == [*data, "mapped.arrow"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_arrow_strings_that_are_no_utf8_are_damage(is_stream: bool, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": ["fine", "broken"]})
    path = tmp_path / "d.arrow"
    with pa.OSFile(str(path), "wb") as sink, (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(
        sink, table.schema
    ) as writer:
        writer.write_table(table, 1)
    path.write_bytes(path.read_bytes().replace(b"broken", b"br\xffken"))
    for read in (arrow.read(path, "text", ()), arrow.read_rows(path), arrow.read(path, "text", (1,))):
        with pytest.raises(UserError, match="cannot be read as Arrow: it is damaged after row 1"):
            list(read)


def test_arrow_files_of_other_forms_and_damaged_ones(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": ["a", None, "b"], "n": [1, 2, 3], "messages": [[{"role": "user"}]] * 3})
    path = tmp_path / "d.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, 2)
    assert list(arrow.read(path, "text", ())) == [("a", (1,)), ("", (2,)), ("b", (3,))]
    with pytest.raises(UserError, match="a column of int64, not of strings"):
        list(arrow.read(path, "n", ()))
    with pytest.raises(UserError, match=r"--json-keys = body: no such column. Accepted: text$"):
        arrow.check(path, "body")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    good = path.read_bytes()
    for damaged in (good[: len(good) // 2], b"hello", b"", b"ARROW1" + good, json.dumps({"text": "a"}).encode()):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read as Arrow: it is damaged"):
            list(arrow.read(path, "text", ()))
