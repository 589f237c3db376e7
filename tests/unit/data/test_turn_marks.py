"""Marks of turns that do not count in the loss: honoured in every spelling, through packing; else refused by name."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.chat.conversation import read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder, Encoded
from hetero_megatron.data.chat.marks import COUNTS, SPARED, UNCLEAR
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.errors import UserError
from tests.support.chat import FORGETFUL, TEMPLATES, chat_tokenizer, turns, unmarked

TURNS = turns("one", "WRONG", "two", "RIGHT")
NO, YES = (False, 0, 0.0, "false", "0", "False", "0.0"), (True, 1, 1.0, "true", "1", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"])


def marked(at: int, key: str, value: Any, messages: list[dict[str, Any]] = TURNS) -> dict[str, Any]:
    found = copy.deepcopy(messages)
    found[at][key] = value
    return {"messages": found}


def share(record: dict[str, Any]) -> dict[str, Any]:
    names = {"role": "from", "content": "value"}
    return {"conversations": [{names.get(k, k): v for k, v in turn.items()} for turn in record["messages"]]}


def encode(folder: Path, record: dict[str, Any], template: str | None = None, everything: bool = False) -> Encoded:
    encoder = ChatEncoder(loaded(str(folder)), template, everything=everything)
    return encoder.encode(read_conversation(record, "c:1"), "c:1")


@functools.cache
def loaded(folder: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder)


def learned(folder: Path, found: Encoded) -> str:
    return str(loaded(str(folder)).decode(found.ids[found.counts]))


def test_every_spelling_leaves_the_turn_out_and_changes_nothing_else(folder: Path) -> None:
    plain = encode(folder, {"messages": TURNS})
    # What transformers marks for the last answer alone.
    out = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TURNS, return_assistant_tokens_mask=True, return_dict=True
    )
    mask = np.array(out["assistant_masks"], bool)
    last = np.flatnonzero(np.diff(mask.astype(int)) == 1)[-1] + 1
    want = mask & (np.arange(len(mask)) >= last)
    for key, off in [(key, NO) for key in COUNTS] + [(key, (True, 1, 1.0, "true", "1")) for key in SPARED]:
        for value in off:
            for record in (marked(1, key, value), share(marked(1, key, value))):
                found = encode(folder, record)
                assert np.array_equal(found.ids, plain.ids) and np.array_equal(found.counts, want), (key, value)
    for key, on in [(key, YES) for key in COUNTS] + [(key, (False, 0, None)) for key in SPARED]:
        for value in on:
            assert np.array_equal(encode(folder, marked(1, key, value)).counts, plain.counts), (key, value)


def test_marks_hold_for_every_template_without_its_marks_and_with_them(folder: Path) -> None:
    for name, template in TEMPLATES.items():
        for text in (template, unmarked(template)):
            said = learned(folder, encode(folder, marked(1, "loss", False), text))
            assert "RIGHT" in said and "WRONG" not in said, name
            said = learned(folder, encode(folder, marked(3, "loss", False), text))
            assert "WRONG" in said and "RIGHT" not in said, name


def test_marks_beside_the_turns(folder: Path) -> None:
    for key in ("loss_mask", "weights", "train", "loss_masks"):
        for values in ([0, 0, 0, 1], [False, False, False, True], [None, 0.0, None, 1.0], ["0", "false", "0", "true"]):
            assert learned(folder, encode(folder, {"messages": TURNS, key: values})) == "RIGHT<|im_end|>\n"
    assert "WRONG" not in learned(folder, encode(folder, {"messages": TURNS, "ignore": [1, 1, 1, 0]}))
    with_system = {"messages": TURNS, "system": "be brief", "loss_mask": [0, 0, 0, 1]}
    assert learned(folder, encode(folder, with_system)) == "RIGHT<|im_end|>\n"
    for whole in ({"train": True}, {"loss_mask": 1}, {"weight": 1.0}, {"mask": "user"}, {"weight": "5 kg"}):
        assert "WRONG" in learned(folder, encode(folder, {"messages": TURNS, **whole}))


def test_marks_hold_where_all_tokens_count(folder: Path) -> None:
    for template in (TEMPLATES["chatml"], unmarked(TEMPLATES["chatml"])):
        said = learned(folder, encode(folder, marked(1, "loss", 0), template, everything=True))
        assert "WRONG" not in said and "one" in said and "two" in said and "RIGHT" in said
        said = learned(folder, encode(folder, marked(2, "train", False), template, everything=True))
        assert "two" not in said and "WRONG" in said
        assert "one" in learned(folder, encode(folder, marked(0, "loss", True), template, everything=True))


def test_marks_in_a_completion_and_a_prompt_that_counts_nothing(folder: Path) -> None:
    record = {"prompt": TURNS[:1], "completion": marked(0, "loss", False, TURNS[1:])["messages"]}
    assert learned(folder, encode(folder, record)) == "RIGHT<|im_end|>\n"


def test_a_conversation_of_which_nothing_counts_is_left_out(folder: Path) -> None:
    record = marked(1, "loss", 0, TURNS[:2])
    assert not encode(folder, record).counts.any()


def test_turns_of_a_template_that_changes_them_are_told_apart_by_its_marks(folder: Path) -> None:
    forgetful = FORGETFUL
    for text in ("{{ m.content.split('</think>')[-1] }}", "{{ m.content }}"):
        forgetful = forgetful.replace(text, "{% if m.role == 'assistant' %}{% generation %}TEXT{% endgeneration %}"
                                      "{% else %}TEXT{% endif %}".replace("TEXT", text))  # fmt: skip
    messages = turns("a", "<think>hm</think>yes", "b", "<think>so</think>no")
    assert learned(folder, encode(folder, marked(1, "loss", 0, messages), forgetful)) == "<think>so</think>no"
    assert learned(folder, encode(folder, marked(3, "loss", 0, messages), forgetful)) == "yes"


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (marked(1, "weight", 0.5), ["messages[1].weight = 0.5", "no weights in between"]),
    (marked(1, "loss", 2), ["messages[1].loss = 2"]),
    (marked(1, "loss_mask", [0, 1]), ["messages[1].loss_mask = [0, 1]: is no such mark"]),
    (marked(1, "train", "perhaps"), ["messages[1].train = \"perhaps\""]),
    ({"messages": [*TURNS[:1], {**TURNS[1], "loss": True, "train": False}]}, ["contradicts loss of the same turn"]),
    ({"messages": [*TURNS[:1], {**TURNS[1], "loss": True, "ignore": True}]}, ["contradicts loss"]),
    ({**marked(1, "loss", True), "loss_mask": [0, 0, 0, 1]}, ["loss_mask[1] = 0", "contradicts a mark of messages[1]"]),
    ({"messages": TURNS, "loss_mask": [0, 1]}, ["loss_mask = [0, 1]", "2 values for 4 turns"]),
    ({"messages": TURNS, "loss_mask": [0, 0.5, 0, 1]}, ["loss_mask[1] = 0.5"]),
    ({"messages": TURNS, "train": False}, ["marked not to be learned from", "select(.train)"]),
    ({"messages": TURNS, "weight": 0.5}, ["weight = 0.5"]),
    ({"messages": TURNS, "mask": [0, 0, 0, 1]}, ["mask = [0, 0, 0, 1]: programs differ"]),
    (marked(1, "los", False), ["messages[1].los = false: no such mark: loss is one"]),
    (marked(1, "trian", 0), ["messages[1].trian = 0"]),
    (marked(1, "weigth", 0), ["messages[1].weigth = 0"]),
    ({"messages": TURNS, "loss_msk": [0, 0, 0, 1]}, ["loss_msk", "loss_mask is one"]),
    ({"prompt": "a", "completion": "b", "loss": False}, ["loss = false"]),
    ({"instruction": "a", "output": "b", "loss_mask": [1, 0]}, ["2 values for 0 turns"]),
    *((marked(1, key, 1), [f"messages[1].{key} = 1: programs differ"]) for key in UNCLEAR),
]  # fmt: skip


def test_other_marks_are_refused_by_name() -> None:
    for record, says in REFUSED:
        with pytest.raises(UserError) as caught:
            read_conversation(record, "c.jsonl:1")
        assert not [word for word in ["c.jsonl:1", *says] if word not in str(caught.value)], caught.value


def test_a_turn_of_the_user_that_is_marked_to_count_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"message 2 is marked to count .* its role is user.*--sft-loss all"):
        encode(folder, marked(2, "loss", True))


@pytest.mark.parametrize("packing", [True, False])
def test_marks_hold_through_packing(packing: bool, folder: Path, tmp_path: Path) -> None:
    records = [marked(1, "loss", False, turns(f"ask {i}", "WRONG", "again", f"answer {i}")) for i in range(12)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for loader in ("single", "streaming"):
        config = DataConfig(
            data_path=(str(tmp_path / "c.jsonl"),), split="1", sft=True, tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(folder), no_packing=not packing, dataloader_type=loader,
        )  # fmt: skip
        data = build_datasets(config, 128, 1, (12, 0, 0), log=lambda _: None)
        said = ""
        assert data.train is not None
        for i in range(4):
            sample = data.train[i]
            assert sample.loss_mask is not None
            said += data.tokenizer.decode(sample.tokens[1:][sample.loss_mask])
        assert "answer" in said and "WRONG" not in said


def test_keys_that_nothing_reads_are_said_once_with_the_nearest(folder: Path, tmp_path: Path) -> None:
    odd = [{**TURNS[0], "nmae": "x", "voice": "low"}, TURNS[1]]
    records = [{"messages": odd, "toolz": [1], "id": 7, "source": "web", "text": "…", "extra": None}] * 3
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    said: list[str] = []
    template = TEMPLATES["chatml"] + "{# voice #}"
    (tmp_path / "t.jinja").write_text(template)
    config = DataConfig(
        data_path=(str(tmp_path / "c.jsonl"),), split="1", sft=True, tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(folder), chat_template=str(tmp_path / "t.jinja"),
    )  # fmt: skip
    build_datasets(config, 64, 1, (3, 0, 0), log=said.append)
    lines = [line for line in said if "not read" in line]
    assert lines == [f"data: {tmp_path}/c.jsonl:1: not read: toolz (tools?), text, nmae of turns (name?)"]


MISSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": TURNS, "functions": [{"name": "f"}]}, "functions = .*tools is"),
    ({"messages": TURNS, "system_prompt": "be brief"}, "system_prompt = .*system is"),
    (marked(1, "function_call", {"name": "f", "arguments": "{}"}), r"messages\[1\].function_call.*tool_calls"),
    (marked(0, "images", ["a.png"]), r"messages\[0\].images.*text only"),
]


def test_content_that_a_user_would_miss_is_refused() -> None:
    for record, says in MISSED:
        with pytest.raises(UserError, match=says):
            read_conversation(record, "c.jsonl:1")
    same = {"messages": turns("a", "b", system="be brief"), "system_prompt": "be brief"}
    assert len(read_conversation(same, "c:1").messages) == 3
