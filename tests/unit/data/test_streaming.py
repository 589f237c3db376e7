"""Streams equal the whole corpus written out, whatever the order of requests, also after a restart from a state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.corpus import Corpus, find_corpus
from hetero_megatron.data.streaming import StreamingDataset
from hetero_megatron.data.tokenizers import ByteTokenizer
from hetero_megatron.errors import UserError
from tests.support.refusals import refused

LENGTH = 13


def texts() -> list[list[str]]:
    rng = np.random.default_rng(0)
    return [["abcdefgh"[i % 8] * int(n) for i, n in enumerate(rng.integers(0, 40, 9))] for _ in range(3)]


@pytest.fixture(params=["jsonl", "parquet", "text"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Corpus:
    for number, documents in enumerate(texts()):
        if request.param == "jsonl":
            body = "".join(json.dumps({"text": d}) + "\n" for d in documents)
            (tmp_path / f"{number}.jsonl").write_text(body)
        elif request.param == "parquet":
            datasets = pytest.importorskip("datasets")
            datasets.Dataset.from_dict({"text": documents}).to_parquet(
                str(tmp_path / f"{number}.parquet"), batch_size=4
            )
        else:
            for i, document in enumerate(documents):
                (tmp_path / f"{number}-{i}.txt").write_text(document)
    return find_corpus(str(tmp_path))


def size(corpus: Corpus) -> tuple[int, int]:
    return len(corpus.files), sum(f.stat().st_size for f in corpus.files)


def stream() -> tuple[list[int], list[bool]]:
    """One epoch written out: (tokens, does a document begin here)."""
    tokens: list[int] = []
    begins: list[bool] = []
    for document in [d for part in texts() for d in part if d]:
        tokens += [*document.encode(), 256]
        begins += [True] + [False] * len(document)
    return tokens, begins


def check(dataset: StreamingDataset, index: int) -> None:
    tokens, begins = stream()
    places = [(index * LENGTH + i) % len(tokens) for i in range(LENGTH + 1)]
    sample = dataset[index]
    assert sample.tokens.tolist() == [tokens[p] for p in places]
    assert sample.documents.tolist() == [i for i, p in enumerate(places[:-1]) if i == 0 or begins[p]]


def test_samples_are_windows_of_the_corpus(corpus: Corpus) -> None:
    dataset = StreamingDataset(corpus, ByteTokenizer(), LENGTH, window=8)
    for index in [*range(100), 97, 95, 99, 3, 4, 110, 0]:  # near ones from the window, far ones by reading again
        check(dataset, index)


def test_a_saved_state_continues_anywhere(corpus: Corpus) -> None:
    for consumed in [0, 1, 2, 7, 23, 40, 41, 55, 80]:
        first = StreamingDataset(corpus, ByteTokenizer(), LENGTH, window=16)
        for index in range(consumed + 3):  # read ahead of what counts as consumed
            first[index]
        state = json.loads(json.dumps(first.state_dict(consumed)))
        assert state["sample"] == consumed
        second = StreamingDataset(corpus, ByteTokenizer(), LENGTH)
        second.load_state_dict(state)
        for index in range(consumed, consumed + 5):
            check(second, index)
        assert second.state_dict(consumed) == first.state_dict(consumed)
        check(second, 0)


def test_a_rank_that_has_not_read_so_far_saves_an_earlier_state(corpus: Corpus) -> None:
    dataset = StreamingDataset(corpus, ByteTokenizer(), LENGTH)
    assert dataset.state_dict(10) == {"sample": 0, "cursor": [], "skip": 0, "corpus": [*size(corpus)]}
    dataset[4]
    state = dataset.state_dict(10)
    assert state["sample"] == 4
    dataset.load_state_dict(state)
    check(dataset, 10)


def test_build_datasets_streams_and_keeps_the_state(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": d}) + "\n" for part in texts() for d in part))
    config = DataConfig(train_data_path=(str(path),), valid_data_path=(str(path),), dataloader_type="streaming")
    first = build_datasets(config, LENGTH, 1, (100, 10, 0))
    assert isinstance(first.train, StreamingDataset) and isinstance(first.valid, StreamingDataset)
    first.train[20]
    second = build_datasets(config, LENGTH, 1, (100, 10, 0))
    second.load_state_dict(json.loads(json.dumps(first.state_dict(20))))
    assert isinstance(second.train, StreamingDataset)
    check(second.train, 20)
    check(first.valid, 0)
    packed = build_datasets(DataConfig(mock_data=True), LENGTH, 1, (1, 0, 0))
    assert packed.state_dict(5) == {}


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    path = str(tmp_path / "a.txt")

    def build(samples: tuple[int, int, int] = (1, 0, 0), **flags: object) -> object:
        return build_datasets(DataConfig(dataloader_type="streaming", **flags), LENGTH, 1, samples)  # type: ignore[arg-type]

    build(data_path=(path,))
    with refused("--split", "99,1,0", "stream"):
        build(data_path=(path,), split="99,1,0")
    with pytest.raises(UserError, match="a stream cannot be split"):
        build((1, 1, 0), data_path=(path,))
    with refused("--dataloader-type", "blend"):
        build(data_path=("0.5", path, "0.5", path))
    with pytest.raises(UserError, match="single, streaming"):
        DataConfig(mock_data=True, dataloader_type="cyclic")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    dataset = StreamingDataset(find_corpus(str(tmp_path / "b.jsonl")), ByteTokenizer(), LENGTH)
    with pytest.raises(UserError, match="empty"):
        dataset[0]


def test_after_a_bad_document_everyone_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "' + 100 * "words " + '"}\n{broken\n{"text": "more"}\n')
    dataset = StreamingDataset(find_corpus(str(tmp_path / "a.jsonl")), ByteTokenizer(), LENGTH)
    good = dataset[0]
    for index in (500, 501, 400, 500):
        with pytest.raises(UserError, match="a.jsonl:2"):
            dataset[index]
    assert (dataset[0].tokens == good.tokens).all()


def test_a_state_of_another_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    dataset = StreamingDataset(find_corpus(str(tmp_path / "a.txt")), ByteTokenizer(), LENGTH)
    for state in ({"corpus": [1, 6], "skip": 0}, {"corpus": [1, 5], "skip": 500}):
        with pytest.raises(UserError, match="not the one that the state was saved with"):
            dataset.load_state_dict({"sample": 9, "cursor": [], **state})
