"""Packing, blends, splits and configs, each against a brute-force reference or a law; and what users get wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.batch import BatchLoader, BatchOptions, make_batch
from hetero_megatron.data.blend import MAX_PERIOD, BlendedDataset, blend_period, integer_weights
from hetero_megatron.data.config import parse_blend, parse_split, split_documents
from hetero_megatron.data.indexed import TokenStore, write_indexed
from hetero_megatron.data.mock import MockDataset, unigram_entropy
from hetero_megatron.data.packing import PackedDataset, permutation
from hetero_megatron.data.sample import Sample
from hetero_megatron.errors import UserError

EOD = 256


def quiet(_: str) -> None:
    """No progress messages."""


def make_store(lengths: list[int], eod: bool = True, name: str = "memory") -> TokenStore:
    """Document d holds 13d, 13d + 7, 13d + 14, ... modulo 250, and an eod at its end if asked for."""
    documents = [np.arange(n, dtype=np.int64) * 7 + d * 13 for d, n in enumerate(lengths)]
    documents = [np.append(d % 250, EOD) if eod else d % 250 for d in documents]
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    tokens = np.concatenate(documents).astype(np.uint16) if documents else np.zeros(0, np.uint16)
    return TokenStore(name, f"{name}{lengths}{eod}", tokens, offsets)


def reference(store: TokenStore, documents: tuple[int, int], seq_length: int, seed: int, count: int) -> list[Sample]:
    """The first samples, from a stream that is written out in full, with a flag at every start of a document."""
    per_epoch = int(store.offsets[documents[1]] - store.offsets[documents[0]])
    epochs = (count + 1) * seq_length // per_epoch + 3
    stream: list[int] = []
    starts: list[bool] = []
    for epoch in range(epochs):
        for d in permutation(documents[1] - documents[0], seed, epoch, 0) + documents[0]:
            tokens = store.tokens[store.offsets[d] : store.offsets[d + 1]].tolist()
            stream += tokens
            starts += [i == 0 for i in range(len(tokens))]
    order: list[int] = []
    for epoch in range(epochs - 1):
        begun = [k for k in range(len(stream)) if epoch * per_epoch <= k * seq_length < (epoch + 1) * per_epoch]
        order += [begun[i] for i in permutation(len(begun), seed, epoch, 1)]
    samples = []
    for k in order[:count]:
        a, b = k * seq_length, k * seq_length + seq_length
        bounds = [0] + [i for i in range(1, seq_length) if starts[a + i]]
        samples.append(Sample(np.array(stream[a : b + 1]), np.array(bounds, np.int32)))
    assert len(samples) == count
    return samples


def same(a: Sample, b: Sample) -> bool:
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.documents, b.documents)


# ------------------------------------------------------------------------------------------------------ packing


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    seq_length=st.integers(1, 20),
    seed=st.integers(0, 2**40),
    eod=st.booleans(),
    data=st.data(),
)
def test_packing_equals_brute_force(
    lengths: list[int], seq_length: int, seed: int, eod: bool, data: st.DataObject
) -> None:
    store = make_store(lengths, eod)
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    if store.offsets[last] - store.offsets[first] < seq_length + 1:
        with pytest.raises(UserError):
            PackedDataset(store, (first, last), seq_length, seed, EOD)
        return
    packed = PackedDataset(store, (first, last), seq_length, seed, EOD, log=quiet)
    for i, expected in enumerate(reference(store, (first, last), seq_length, seed, 25)):
        assert same(packed[i], expected), i
        assert packed[i].tokens.dtype == np.int64 and packed[i].documents.dtype == np.int32


def test_a_sample_does_not_depend_on_the_order_of_requests_or_on_how_many_follow() -> None:
    store = make_store([5, 40, 1, 17, 90, 3])
    forward = [PackedDataset(store, (0, 6), 8, 7, EOD)[i] for i in range(200)]
    packed = PackedDataset(store, (0, 6), 8, 7, EOD)
    for i in np.random.default_rng(0).permutation(200):
        assert same(packed[int(i)], forward[int(i)])


def test_threads_get_the_same_samples() -> None:
    store = make_store([5, 40, 1, 17, 90, 3])
    expected = [PackedDataset(store, (0, 6), 8, 7, EOD)[i] for i in range(120)]
    packed = PackedDataset(store, (0, 6), 8, 7, EOD)
    wrong: list[int] = []

    def work(offset: int) -> None:
        order = [(i * 37 + offset) % 120 for i in range(120)]
        wrong.extend(i for i in order if not same(packed[i], expected[i]))

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 50, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_epoch_gives_every_token_once_and_epochs_and_seeds_differ() -> None:
    store = make_store([11, 4, 29, 8, 8])  # 65 tokens with the eods: 13 windows of 5
    packed = PackedDataset(store, (0, 5), 5, 3, EOD)
    inputs = [np.concatenate([packed[e * 13 + i].tokens[:-1] for i in range(13)]) for e in range(3)]
    for epoch in inputs:
        assert Counter(epoch.tolist()) == Counter(store.tokens.tolist())
    assert not np.array_equal(inputs[0], inputs[1]) and not np.array_equal(inputs[1], inputs[2])
    other = PackedDataset(store, (0, 5), 5, 4, EOD)
    assert not all(same(packed[i], other[i]) for i in range(13))


def test_an_end_of_document_belongs_to_the_document_it_ends() -> None:
    store = make_store([3] * 5)
    packed = PackedDataset(store, (0, 5), 16, 0, EOD)
    for i in range(6):
        sample = packed[i]
        ends = np.flatnonzero(sample.tokens[:-1] == EOD)
        assert sample.documents.tolist() == [0, *[int(e) + 1 for e in ends if e + 1 < 16]]


def test_the_index_in_the_cache_gives_the_same_samples_and_damage_is_repaired(tmp_path: Path) -> None:
    store = make_store([9, 30, 14])
    plain = [PackedDataset(store, (0, 3), 8, 1, EOD)[i] for i in range(20)]
    for round in range(3):
        packed = PackedDataset(store, (0, 3), 8, 1, EOD, cache=tmp_path, log=quiet)
        assert all(same(packed[i], plain[i]) for i in range(20)), round
        assert not list(tmp_path.glob("*.tmp"))
        if round == 1:
            for file in tmp_path.iterdir():
                file.write_bytes(file.read_bytes()[:40])
    other = PackedDataset(store, (0, 3), 8, 2, EOD, cache=tmp_path, log=quiet)
    uncached = PackedDataset(store, (0, 3), 8, 2, EOD)
    assert all(same(other[i], uncached[i]) for i in range(20))  # another seed finds no index of this one


# ------------------------------------------------------------------------------------------------ blend and split


def check_blend(weights: tuple[int, ...], chosen: np.ndarray) -> None:
    taken = np.cumsum(chosen[:, None] == np.arange(len(weights)), axis=0)
    due = np.arange(1, len(chosen) + 1)[:, None] * (np.array(weights) / sum(weights))
    assert np.abs(taken - due).max() < 1 + 1e-6


@settings(max_examples=150)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_any_prefix_of_a_blend_is_within_one_sample_of_its_weights(weights: list[float]) -> None:
    whole = integer_weights([float(f"{w:.3g}") for w in weights])
    if sum(whole) <= 20_000:
        check_blend(whole, np.tile(blend_period(whole), 2))


@pytest.mark.parametrize("weights", [[1.0], [1e-9, 1.0], [0.1234567, 0.7654321, 0.333333], [1.0] * 50, [3, 1e6, 7]])
def test_the_blend_law_holds_for_extreme_weights(weights: list[float]) -> None:
    whole = integer_weights(weights)
    assert sum(whole) <= MAX_PERIOD + len(weights) and min(whole) >= 1
    check_blend(whole, blend_period(whole))


def test_a_blend_takes_the_samples_of_each_part_in_order_without_gaps() -> None:
    class Numbers:
        def __init__(self, which: int) -> None:
            self.which = which

        def __getitem__(self, index: int) -> Sample:
            return Sample(np.array([self.which, index]), np.zeros(1, np.int32))

    blend = BlendedDataset([Numbers(0), Numbers(1), Numbers(2)], [0.5, 0.2, 0.3])
    found = [blend[i].tokens.tolist() for i in range(100)]
    for d, expected in enumerate((50, 20, 30)):
        assert [index for which, index in found if which == d] == list(range(expected))
    assert blend[73].tokens.tolist() == found[73]  # random access


@given(st.integers(0, 10_000), st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any))
def test_splits_cover_all_documents_once(count: int, shares: list[int]) -> None:
    ranges = split_documents(count, parse_split(",".join(map(str, shares))))
    assert ranges[0][0] == 0 and ranges[-1][1] == count
    assert all(a[1] == b[0] and a[0] <= a[1] for a, b in zip(ranges, ranges[1:]))
    for (first, last), share in zip(ranges, [*shares, 0, 0]):
        assert abs(last - first - Fraction(count * share, sum(shares))) <= 1


def test_split_of_99_1_0() -> None:
    assert split_documents(200, parse_split("99,1,0")) == [(0, 198), (198, 200), (200, 200)]


# ---------------------------------------------------------------------------------------- mock, loader, entropy


def test_mock_samples_are_a_function_of_seed_and_index_and_can_be_learned() -> None:
    a, b = (MockDataset(seq_length=64, seed=5, eod=99) for _ in range(2))
    order = list(np.random.default_rng(1).permutation(40))
    later = {int(i): b[int(i)] for i in order}
    assert all(same(a[i], later[i]) for i in range(40))
    assert not same(a[0], a[1]) and not same(a[0], MockDataset(seq_length=64, seed=6, eod=99)[0])
    tokens = np.concatenate([a[i].tokens for i in range(40)])
    assert tokens.min() >= 0 and tokens.max() < 100
    pairs = Counter(zip(tokens[:-1].tolist(), tokens[1:].tolist()))
    joint = np.array(list(pairs.values())) / (len(tokens) - 1)
    conditional = -(joint * np.log(joint)).sum() - unigram_entropy(tokens)
    assert conditional < 0.6 * unigram_entropy(tokens)


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.array([1, 1, 1])) == 0
    assert unigram_entropy(np.arange(8).repeat(3)) == pytest.approx(np.log(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_equal_plain_ones(workers: int) -> None:
    packed = PackedDataset(make_store([5, 40, 1, 17, 90, 3]), (0, 6), 8, 7, EOD)
    options = BatchOptions(True, True, True, EOD)
    with BatchLoader(packed, options, workers) as loader:
        for step in range(6):
            for first in (0, 2, 4):
                indices = [step * 6 + first, step * 6 + first + 1]
                got, expected = loader(indices), make_batch(packed, indices, options)
                assert got.tokens.equal(expected.tokens) and got.labels.equal(expected.labels)
                assert got.positions.equal(expected.positions) and got.documents == expected.documents
                assert got.loss_mask is not None and expected.loss_mask is not None
                assert got.loss_mask.equal(expected.loss_mask)
            loader.advance(6 if step != 3 else 100)  # a wrong announcement costs time and nothing else


def test_an_error_in_the_background_reaches_the_request_it_belongs_to_and_no_other() -> None:
    class Broken:
        def __getitem__(self, index: int) -> Sample:
            if index == 5:
                raise UserError("broken", field="--data-path", value="x")
            return Sample(np.arange(4), np.zeros(1, np.int32))

    before = threading.active_count()
    with BatchLoader(Broken(), BatchOptions()) as loader:
        loader.prefetch([[4], [5], [6]])
        assert loader([4]).tokens.shape == (1, 3)
        with pytest.raises(UserError, match="broken"):
            loader([5])
        assert loader([6]).tokens.shape == (1, 3)
    assert threading.active_count() == before


# ------------------------------------------------------------------------------------------------------- builds


def text_file(folder: Path, documents: int = 40, name: str = "a.jsonl") -> str:
    path = folder / name
    path.write_text("".join(f'{{"text": "document {i} {"words " * 20}"}}\n' for i in range(documents)))
    return str(path)


def test_build_datasets_packs_text_and_splits_it(tmp_path: Path) -> None:
    config = DataConfig(data_path=(text_file(tmp_path),), split="80,20")
    built = build_datasets(config, 32, 1234, (10, 4, 0), log=quiet)
    assert isinstance(built.train, PackedDataset) and isinstance(built.valid, PackedDataset) and built.test is None
    assert built.eod == 256 and built.vocab_size == 257
    train, valid = (d.all_tokens().tolist() for d in (built.train, built.valid))
    assert train.count(EOD) == 32 and valid.count(EOD) == 8 and train[-1] == valid[-1] == EOD
    words = [bytes(t for t in tokens if t != EOD) for tokens in (train, valid)]
    assert b"document 31 " in words[0] and b"document 32 " not in words[0] and words[1].startswith(b"document 32 ")
    again = build_datasets(config, 32, 1234, (10_000, 0, 0), log=quiet)
    assert again.train is not None and all(same(again.train[i], built.train[i]) for i in range(50))


def test_build_datasets_blends_and_reads_indexed_files(tmp_path: Path) -> None:
    documents = [np.arange(50) % 90 + d % 5 for d in range(20)]
    write_indexed(str(tmp_path / "b"), documents, np.uint16)
    words = ("3", str(tmp_path / "b"), "1", str(tmp_path / "b"))
    config = DataConfig(data_path=words, vocab_size=100, tokenizer_type="NullTokenizer", split="1")
    built = build_datasets(config, 16, 0, (8, 0, 0), model_vocab_size=101, log=quiet)
    assert isinstance(built.train, BlendedDataset) and built.train.weights == (3, 1)
    assert built.train[11].tokens.shape == (17,)


def test_mock_validation_is_not_the_training_data() -> None:
    built = build_datasets(DataConfig(mock_data=True), 16, 1, (4, 4, 0), model_vocab_size=300)
    assert built.train is not None and built.valid is not None and not same(built.train[0], built.valid[0])


# --------------------------------------------------------------------------------------------------- bad input


def _build(folder: Path, samples: tuple[int, int, int] = (4, 0, 0), seq: int = 8, **fields: object) -> None:
    fields.setdefault("data_path", (text_file(folder),))
    build_datasets(DataConfig(**fields), seq, 0, samples, log=quiet)  # type: ignore[arg-type]


def _indexed(folder: Path) -> str:
    write_indexed(str(folder / "big"), [np.arange(300)], np.int32)
    return str(folder / "big")


BAD: dict[str, tuple[str, object, Callable[[Path], object]]] = {
    "corpus smaller than one sample": ("--data-path", "memory", lambda p: PackedDataset(make_store([5]), (0, 1), 8, 0)),
    "split has no documents": ("--data-path", "memory", lambda p: PackedDataset(make_store([50]), (1, 1), 8, 0)),
    "token beyond the vocabulary": (
        "--data-path", "memory", lambda p: PackedDataset(make_store([500]), (0, 1), 8, 0, vocab_size=200),
    ),
    "token of an .idx beyond the vocabulary": (
        "--data-path", None,
        lambda p: _build(p, data_path=(_indexed(p),), vocab_size=100, tokenizer_type="NullTokenizer", split="1"),
    ),
    "negative weight": ("--data-path", "-1 a 2 b", lambda p: parse_blend(("-1", "a", "2", "b"))),
    "zero weight": ("--data-path", "0 a 2 b", lambda p: parse_blend(("0", "a", "2", "b"))),
    "infinite weight": ("--data-path", "inf a 2 b", lambda p: parse_blend(("inf", "a", "2", "b"))),
    "odd blend list": ("--data-path", "1 a 2", lambda p: parse_blend(("1", "a", "2"))),
    "weights after paths": ("--data-path", "a 1 b 2", lambda p: parse_blend(("a", "1", "b", "2"))),
    "weight of a blend in code": ("--data-path", 0.0, lambda p: BlendedDataset([MockDataset(8, 0, eod=8)], [0.0])),
    "split that leaves nothing": ("--split", "99,1,0", lambda p: _build(p, (1, 1, 0), data_path=(text_file(p, 2),),
                                                                        split="99,1,0")),
    "split that gives the test nothing": ("--split", "99,1,0", lambda p: _build(p, (1, 1, 1), split="99,1,0")),
    "malformed split": ("--split", "99,one", lambda p: parse_split("99,one")),
    "empty split": ("--split", "", lambda p: parse_split("")),
    "negative split": ("--split", "99,-1", lambda p: parse_split("99,-1")),
    "split of zeros": ("--split", "0,0,0", lambda p: parse_split("0,0,0")),
    "split of four": ("--split", "1,1,1,1", lambda p: parse_split("1,1,1,1")),
    "infinite split": ("--split", "inf,1", lambda p: parse_split("inf,1")),
    "data path and mock data": ("--data-path", None, lambda p: DataConfig(data_path=("x",), mock_data=True)),
    "no data at all": ("--data-path", None, lambda p: DataConfig()),
    "split with its own paths": ("--split", "1", lambda p: DataConfig(train_data_path=("x",), split="1")),
    "validation without data": (
        "--valid-data-path", None,
        lambda p: _build(p, (1, 1, 0), data_path=None, train_data_path=(text_file(p),)),
    ),
    "no such path": ("--data-path", "nowhere.txt", lambda p: _build(p, data_path=("nowhere.txt",))),
    "sequence length 0": ("--seq-length", 0, lambda p: _build(p, seq=0)),
    "negative workers": ("--num-workers", -1, lambda p: _build(p, num_workers=-1)),
    "unknown tokenizer": ("--tokenizer-type", "Bytes", lambda p: _build(p, tokenizer_type="Bytes")),
    "tokenizer larger than the model": (
        "--data-path", None,
        lambda p: build_datasets(DataConfig(data_path=(text_file(p),)), 8, 0, (1, 0, 0), model_vocab_size=256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_field_and_value(name: str, tmp_path: Path) -> None:
    field, value, action = BAD[name]
    with pytest.raises(UserError) as caught:
        action(tmp_path)
    assert caught.value.field == field
    if value is not None:
        assert caught.value.value == value
    assert field in str(caught.value)
