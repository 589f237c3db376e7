"""Preference data: every form gives the two conversations that TRL makes of it; bad records are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hetero_megatron.data.batch import BatchOptions, make_batch
from hetero_megatron.data.build import build_datasets
from hetero_megatron.data.chat.pairs import read_pair
from hetero_megatron.data.config import DataConfig
from hetero_megatron.errors import UserError
from tests.support.chat import TEMPLATES, chat_tokenizer, turns, unmarked

USER, GOOD, BAD = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, "no"
FORMER = turns("a", "b", "hi")
REJECTED = {"role": "assistant", "content": BAD}
# Records, and the messages of the prompt, with the answers "yes" and "no" (texts: None).
FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"prompt": "hi ", "chosen": "yes", "rejected": "no"}, "hi "),
    ({"chosen": "hi yes", "rejected": "hi no"}, "hi"),  # a space belongs to the answers, as in TRL
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [REJECTED]}, [USER]),
    ({"chosen": [USER, GOOD], "rejected": [USER, REJECTED]}, [USER]),
    ({"chosen": [*FORMER, GOOD], "rejected": [*FORMER, REJECTED]}, FORMER),
    ({"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, REJECTED], "score_chosen": 1.0}, [USER]),
    ({"messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, REJECTED]}, [USER]),
    ({"messages": FORMER, "chosen": GOOD, "rejected": REJECTED}, FORMER),
    ({"messages": [*FORMER, GOOD], "chosen": GOOD, "rejected": REJECTED}, FORMER),
    ({"messages": FORMER, "chosen": "yes", "rejected": "no"}, FORMER),
    ({"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "yes"},
      "rejected": {"from": "gpt", "value": "no"}}, [USER]),
    ({"instruction": "hi", "input": "", "chosen": "yes", "rejected": "no"}, [USER]),
    ({"instruction": "hi", "input": "you", "chosen": "yes", "rejected": "no"}, [USER | {"content": "hi\nyou"}]),
    ({"system": "be", "prompt": [USER], "chosen": [GOOD], "rejected": [REJECTED]},
     [{"role": "system", "content": "be"}, USER]),
]  # fmt: skip


def test_forms() -> None:
    for record, prompt in FORMS:
        for conversation, answer in zip(read_pair(record, "file:1"), ("yes", "no"), strict=True):
            if isinstance(prompt, str):
                space = " " if prompt == "hi" else ""
                assert conversation.text == (prompt, space + answer), record
            else:
                wanted = [*prompt, {"role": "assistant", "content": answer}]
                assert list(conversation.messages) == wanted, record
                assert conversation.first in (0, len(prompt)), record


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b"}, "rejected = missing: the record is no preference pair (it has chosen, prompt)"),
    ({"messages": [USER, GOOD]}, "chosen = missing"),
    ({"text": "a"}, "chosen = missing"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both are the same"),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen = \"\": is empty"),
    ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected = \" \": is empty"),
    ({"prompt": "a", "chosen": "b", "rejected": []}, "rejected = []: is empty"),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD | {"content": ""}]}, "rejected"),
    ({"chosen": [USER, GOOD], "rejected": [USER]}, "rejected"),
    ({"chosen": "ab", "rejected": "a"}, "rejected"),
    ({"chosen": [USER, GOOD], "rejected": [FORMER[0], REJECTED]}, "they begin with unlike messages"),
    ({"prompt": "a", "chosen": "b", "rejected": [REJECTED]}, "one of them is a text, the other one is not"),
    ({"prompt": "a", "chosen": 3, "rejected": 4}, "chosen = 3: is no answer"),
    ({"prompt": [USER], "chosen": [USER], "rejected": [REJECTED]}, "chosen"),
    ({"prompt": [USER], "chosen": [GOOD, 3], "rejected": [REJECTED]}, "chosen[1]"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "label": 1}, "label = 1: the record is rated"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x"]}, "this version trains on text only"),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt"),
    ({"prompt": [USER], "chosen": "b", "rejected": "c"}, "one of them is a string"),
    ({"messages": [], "chosen": "b", "rejected": "c"}, "is empty"),
]  # fmt: skip


def test_refusals_name_the_side() -> None:
    for record, told in REFUSED:
        with pytest.raises(UserError) as found:
            read_pair(record, "file:1")
        assert told in str(found.value) and "\n" not in str(found.value), (record, str(found.value))


def write(folder: Path, records: list[dict[str, Any]], **options: Any) -> DataConfig:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(
        data_path=(str(folder / "pairs.jsonl"),), split="1", sft=True, preference="dpo",
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer"), **options,
    )  # fmt: skip


def test_samples_hold_whole_pairs(tmp_path: Path) -> None:
    """Every pair once an epoch, both answers in one sample, tokens and masks those of the chat template; two corpora
    have numbers of their own."""
    chat_tokenizer(tmp_path / "tokenizer", unmarked(TEMPLATES["chatml"]))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    records = [
        {"chosen": turns(f"say {i}", "x" * (i % 7 + 1)), "rejected": turns(f"say {i}", "y" * (i % 5 + 1))}
        for i in range(20)
    ]
    config = write(tmp_path, records)
    data = build_datasets(config, 256, 1, (1, 0, 0), log=lambda _: None).train
    wanted = {}
    for number, record in enumerate(records):
        wanted[number] = []
        for side in ("chosen", "rejected"):
            whole = theirs.apply_chat_template(record[side], tokenize=False)
            prompt = theirs.apply_chat_template(record[side][:1], tokenize=False, add_generation_prompt=True)
            assert whole.startswith(prompt)
            answer = theirs(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
            wanted[number].append((theirs(whole, add_special_tokens=False)["input_ids"], answer))
    seen: list[int] = []
    for index in range(data.num_packs):  # type: ignore[union-attr]
        sample = data[index]  # type: ignore[index]
        batch = make_batch(data, [index], BatchOptions(True, True))  # type: ignore[arg-type]
        assert batch.pairs is not None and batch.loss_mask is not None and batch.pairs.numbers == sample.pairs
        ends = [*sample.documents.tolist()[1:], 256]
        for k in range(2 * len(sample.pairs)):
            ids, answer = wanted[sample.pairs[k // 2]][k % 2]
            assert sample.tokens[sample.documents[k] : ends[k]][: len(ids)].tolist() == ids
            own = (batch.pairs.sides[0] == k) & batch.loss_mask[0]
            assert batch.labels[0][own].tolist() == answer and batch.pairs.lengths[k] == len(answer)
        seen += sample.pairs
    assert sorted(seen) == list(range(20)) and data.num_packs < 20  # type: ignore[union-attr]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:5]))
    both = DataConfig(**{**vars(config), "data_path": ("0.5", config.data_path[0], "0.5", f"{tmp_path}/more.jsonl")})
    blend = build_datasets(both, 64, 1, (1, 0, 0), log=lambda _: None).train
    assert {n for i in range(60) for n in blend[i].pairs or ()} == set(range(25))  # type: ignore[index]


def test_long_pairs(tmp_path: Path) -> None:
    """Cut at the end that was asked for, the longer answer first; a prompt that fills the context leaves nothing, which
    is said, and refused where nothing is left."""
    chat_tokenizer(tmp_path / "tokenizer", unmarked(TEMPLATES["chatml"]))
    fits = {"prompt": turns("a"), "chosen": turns("", "b c d")[1:], "rejected": turns("", "z " * 60)[1:]}
    fills = {"prompt": turns("word " * 90), "chosen": [GOOD], "rejected": [REJECTED]}
    told: list[str] = []
    data = build_datasets(write(tmp_path, [fits, fills]), 64, 1, (1, 0, 0), log=told.append).train
    sample = data[0]  # type: ignore[index]
    assert sample.pairs == (0,) and len(sample.tokens) == 65 and sample.documents[1] < 32
    assert any("1 pair left out: of an answer no token is in reach" in line for line in told), told
    with pytest.raises(UserError, match="none of its 1 pair can be used"):
        build_datasets(write(tmp_path, [fills]), 64, 1, (1, 0, 0), log=told.append)
    with pytest.raises(UserError, match="a pair has .* tokens, a sample 64"):
        build_datasets(write(tmp_path, [fits], overlong_samples="refuse"), 64, 1, (1, 0, 0), log=told.append)
    end = build_datasets(write(tmp_path, [fits], overlong_samples="keep-end"), 64, 1, (1, 0, 0), log=told.append).train
    assert np.array_equal(end[0].tokens[:64][: end[0].documents[1]], sample.tokens[: sample.documents[1]])  # type: ignore[index]
    same = {"prompt": turns("a"), "chosen": turns("", "b " * 60)[1:], "rejected": turns("", "b " * 60 + "c")[1:]}
    with pytest.raises(UserError, match="none of its 1 pair can be used"):
        build_datasets(write(tmp_path, [same]), 64, 1, (1, 0, 0), log=told.append)


def test_other_data_and_flags_are_refused(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "tokenizer", TEMPLATES["chatml"])
    for options, told in (
        ({"dataloader_type": "streaming"}, "pairs are addressed by number, which a stream has not"),
        ({"sft_loss": "all"}, "a pair is compared by its answers alone"),
    ):
        with pytest.raises(UserError, match=told):
            write(tmp_path, [FORMS[2][0]], **options)
    with pytest.raises(UserError, match="the record is no preference pair"):
        build_datasets(write(tmp_path, [{"messages": [USER, GOOD]}]), 64, 1, (1, 0, 0), log=lambda _: None)
    with pytest.raises(UserError, match="--preference dpo"):
        config = DataConfig(**{**vars(write(tmp_path, [FORMS[2][0]])), "preference": None})
        build_datasets(config, 64, 1, (1, 0, 0), log=lambda _: None)
