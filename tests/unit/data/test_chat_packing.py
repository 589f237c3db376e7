"""Conversations in samples: nothing is lost or cut, every epoch has all, streams restart, what is left out is told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.batch import BatchOptions, make_batch
from hetero_megatron.data.chat.build import show_sample
from hetero_megatron.data.chat.packing import best_fit
from hetero_megatron.data.sample import Dataset, Sample, Stream
from hetero_megatron.errors import UserError
from tests.support.chat import TEMPLATES, chat_tokenizer, turns

SEQ = 64


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_best_fit_packs_everything_once(lengths: list[int], capacity: int, seed: int) -> None:
    order = np.random.RandomState(seed).permutation(len(lengths))
    packs = best_fit(lengths, capacity, order)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)
    # No two packs would fit into one: the bound that any-fit algorithms have.
    full = sorted(sum(lengths[i] for i in pack) for pack in packs)
    assert len(full) < 2 or full[0] + full[1] > capacity
    assert len(best_fit(lengths, capacity, np.arange(len(lengths)))) == len(packs)  # ties do not change how many


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"])


def write(path: Path, conversations: list[Any], form: str = "jsonl") -> Path:
    rows = [{"messages": c, "id": i} for i, c in enumerate(conversations)]
    if form == "json":
        path.write_text(json.dumps(rows))
    elif form == "parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(count: int = 40) -> list[Any]:
    """Each with a question and an answer that no other has."""
    rng = np.random.RandomState(0)
    return [turns(f"question {i}", f"answer {i} " + "fox " * int(rng.randint(0, 12))) for i in range(count)]


def build(path: Path, tokenizer: Path, **more: Any) -> tuple[Dataset, list[str]]:
    log: list[str] = []
    config = DataConfig(data_path=(str(path),), split="1", tokenizer_model=str(tokenizer), sft=True, **more)
    built = build_datasets(config, SEQ, 7, (10, 0, 0), 400, log.append)
    assert built.train is not None
    return built.train, log


def conversations_in(sample: Sample) -> list[tuple[list[int], list[bool]]]:
    """Ids and the mask of each document but padding; every mask position belongs to the token after it."""
    out = []
    assert sample.loss_mask is not None
    counts = np.concatenate([[False], sample.loss_mask])
    for a, b in zip(sample.documents, [*sample.documents[1:], len(sample.tokens)]):
        if counts[a:b].any():
            out.append((sample.tokens[a:b].tolist(), counts[a:b].tolist()))
    return out


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("loader", ["single", "streaming"])
def test_an_epoch_has_every_conversation_once_and_whole(
    loader: str, form: str, tokenizer: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / f"chats.{form}", chats(), form)
    data, log = build(path, tokenizer, dataloader_type=loader, shuffle_buffer=15)
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    wanted = Counter()
    for chat in chats():
        out = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        wanted[tuple(out["input_ids"]), tuple(map(bool, out["assistant_masks"]))] += 1
    at = 0
    for _ in range(2):
        found: Counter[Any] = Counter()
        while sum(found.values()) < len(chats()):
            inside = conversations_in(data[at])
            assert sum(len(ids) for ids, _ in inside) <= SEQ
            found.update((tuple(ids), tuple(mask)) for ids, mask in inside)
            at += 1
        assert found == wanted
    assert any("% full" in line for line in log) or loader == "streaming"


@pytest.mark.parametrize("loader", ["single", "streaming"])
def test_samples_do_not_depend_on_the_order_of_requests(loader: str, tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chats())
    first, _ = build(path, tokenizer, dataloader_type=loader, shuffle_buffer=10)
    second, _ = build(path, tokenizer, dataloader_type=loader, shuffle_buffer=10)
    ahead = [first[i] for i in range(40)]
    back = [second[i] for i in range(39, -1, -1)][::-1]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(ahead, back))
    assert len({a.tokens.tobytes() for a in ahead}) > 20


def test_a_stream_goes_on_from_its_state(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chats())
    whole, _ = build(path, tokenizer, dataloader_type="streaming", shuffle_buffer=10)
    wanted = [whole[i].tokens.tolist() for i in range(60)]
    for at in (0, 3, 17, 33, 59):
        reader, _ = build(path, tokenizer, dataloader_type="streaming", shuffle_buffer=10)
        assert isinstance(whole, Stream) and isinstance(reader, Stream)
        state = json.loads(json.dumps(whole.state_dict(at)))
        assert state["parts"][0]["sample"] > at - 15
        reader.load_state_dict(state)
        assert [reader[i].tokens.tolist() for i in range(at, 60)] == wanted[at:]
    other, _ = build(path, tokenizer, dataloader_type="streaming", shuffle_buffer=11)
    with pytest.raises(UserError, match="shuffle-buffer"):
        other.load_state_dict(whole.state_dict(3))  # type: ignore[attr-defined]


def test_blends_of_streams(tokenizer: Path, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.jsonl", [turns(n, f"{n}{i}") for i in range(9)]) for n in ("aa", "bb")]
    words = ("3", str(paths[0]), "1", str(paths[1]))
    config = DataConfig(
        data_path=words, split="1", tokenizer_model=str(tokenizer), sft=True, dataloader_type="streaming",
        no_packing=True, shuffle_buffer=4,
    )  # fmt: skip

    def stream() -> Any:
        return build_datasets(config, SEQ, 7, (10, 0, 0), 400, lambda _: None).train

    data, theirs = stream(), AutoTokenizer.from_pretrained(tokenizer)
    texts = ["a" if "aa" in theirs.decode(data[i].tokens) else "b" for i in range(40)]
    assert texts.count("a") == 30
    again = stream()
    again.load_state_dict(json.loads(json.dumps(data.state_dict(21))))
    assert all(np.array_equal(again[i].tokens, data[i].tokens) for i in range(21, 40))


def test_batches_keep_conversations_apart(tokenizer: Path, tmp_path: Path) -> None:
    data, _ = build(write(tmp_path / "chats.jsonl", chats()), tokenizer)
    batch = make_batch(data, range(3), BatchOptions(True, True))
    assert batch.documents is not None and batch.loss_mask is not None
    for row in range(3):
        starts = [*batch.documents[row], SEQ]
        for a, b in zip(starts, starts[1:]):
            assert batch.positions[row, a:b].tolist() == list(range(b - a))
            assert not batch.loss_mask[row, b - 1]  # what follows is another conversation
    assert batch.num_loss_tokens() == int(batch.loss_mask.sum()) > 0


@pytest.mark.parametrize("loader", ["single", "streaming"])
@pytest.mark.parametrize("policy", ["keep-start", "keep-end", "drop", "refuse"])
def test_long_conversations(policy: str, loader: str, tokenizer: Path, tmp_path: Path) -> None:
    long = [turns("q", "x" * 100), turns("y" * 100, "late answer")]
    path = write(tmp_path / "chats.jsonl", [turns("short", "one"), *long])
    if policy == "refuse":
        with pytest.raises(UserError, match="overlong-samples"):
            data, _ = build(path, tokenizer, overlong_samples=policy, dataloader_type=loader)
            data[0]
        return
    data, log = build(path, tokenizer, overlong_samples=policy, dataloader_type=loader, no_packing=True)
    first = [conversations_in(data[i]) for i in range({"keep-start": 2, "keep-end": 3, "drop": 1}[policy])]
    decoded = sorted(AutoTokenizer.from_pretrained(tokenizer).decode(ids) for found in first for ids, _ in found)
    kept = {"keep-start": ["xxx", "one"], "keep-end": ["xxx", "one", "late answer"], "drop": ["one"]}[policy]
    assert len(decoded) == len(kept) and all(any(k in text for text in decoded) for k in kept)
    told = {"keep-start": "2 of 3 conversations", "keep-end": "2 of 3 conversations", "drop": "2 conversations longer"}
    assert loader == "streaming" or any(told[policy] in line for line in log)
    assert policy != "keep-start" or loader == "streaming" or any("no token of the assistant" in line for line in log)


def test_the_first_sample_is_shown_with_its_mask(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [turns("hello", "the fox")])
    data, _ = build(path, tokenizer)
    text = show_sample(data[0], build_datasets(
        DataConfig(data_path=(str(path),), split="1", tokenizer_model=str(tokenizer), sft=True), SEQ, 1, (0, 0, 0), 400,
        lambda _: None,
    ).tokenizer)  # fmt: skip
    assert "<|im_start|>assistant\n⟦the fox<|im_end|>\n⟧" in text and "⟦" not in text.split("assistant")[0][90:]


def test_data_sets_by_name(tokenizer: Path, tmp_path: Path) -> None:
    """``hub:`` of a local folder with shards, as ``datasets`` reads it: whole and as a stream."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        write(folder / f"train-{i}.parquet", chats(40)[i::3], "parquet")
    name = f"hub:{folder}:train"
    for loader in ("single", "streaming"):
        data, _ = build(Path(name), tokenizer, dataloader_type=loader, data_cache_path=str(tmp_path / "cache"))
        found: set[tuple[int, ...]] = set()
        at = 0
        while len(found) < 40:
            found |= {tuple(ids) for ids, _ in conversations_in(data[at])}
            at += 1
            assert at < 100
    with pytest.raises(UserError, match="datasets cannot load"):
        build(Path(f"hub:{folder}:validation"), tokenizer)
