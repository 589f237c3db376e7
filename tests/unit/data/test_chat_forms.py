"""Forms of records that people have: what each means to the template of transformers, and why others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hetero_megatron.data.chat.conversation import read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.errors import UserError
from tests.support.chat import TEMPLATES, chat_tokenizer, turns

ASKED, BRIEF = turns("hello", "fox"), turns("hello", "fox", system="be brief")
SHARE = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fox"}]
ADDED = turns("add\n1 2", "3")

SAME: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "system beside messages": ({"system": "be brief", "messages": ASKED}, BRIEF),
    "system beside ShareGPT": ({"system": "be brief", "conversations": SHARE}, BRIEF),
    "no system": ({"system": "", "conversations": SHARE}, ASKED),
    "ShareGPT under messages": ({"messages": SHARE}, ASKED),
    "one conversation": ({"conversation": ASKED}, ASKED),
    "the prompt once more": ({"prompt": "hello", "prompt_id": "7", "messages": ASKED}, ASKED),
    "the better one as messages": ({"prompt": "x", "chosen": ASKED, "rejected": ASKED, "messages": ASKED}, ASKED),
    "JSON in a column": ({"messages": json.dumps(ASKED)}, ASKED),
    "Alpaca": ({"instruction": "add", "input": "1 2", "output": "3"}, ADDED),
    "Alpaca without an input": ({"instruction": "hello", "input": "", "output": "fox"}, ASKED),
    "system beside a prompt": ({"system": "be brief", "prompt": ASKED[:1], "completion": ASKED[1:]}, BRIEF),
    "no rating, no image": ({"messages": ASKED, "label": None, "kto_tag": "x", "images": [], "image": ""}, ASKED),
    "Alpaca without an instruction": ({"instruction": "", "input": "hello", "output": "fox", "context": ""}, ASKED),
    "Alpaca with system": ({"instruction": "hello", "output": "fox", "system": "be brief", "history": []}, BRIEF),
}


@pytest.mark.parametrize("name", SAME)
def test_a_form_means_these_messages_to_the_template(name: str, folder: Path) -> None:
    record, messages = SAME[name]
    out = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    found = ChatEncoder(HuggingFaceTokenizer(str(folder))).encode(read_conversation(record, "c:1"), "c:1")
    assert found.ids.tolist() == out["input_ids"]
    assert found.counts.tolist() == [bool(m) for m in out["assistant_masks"]]


def test_a_prompt_after_a_system_text_does_not_count() -> None:
    record = {"system": "be brief", "prompt": ASKED, "completion": ASKED[1:]}
    assert read_conversation(record, "c:1").first == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"])


IMAGE = [{"role": "user", "content": [{"type": "image"}]}, *ASKED]
OTHER: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a preference pair": ({"prompt": "a", "chosen": "b", "rejected": "c"}, ["--preference dpo", "completion: .chosen"]),
    "two conversations": ({"chosen": ASKED, "rejected": ASKED}, ["--preference dpo", "{messages: .chosen}"]),
    "rated": ({"prompt": "a", "completion": "b", "label": False}, ["label = false", "preference", "select(.label)"]),
    "rated messages": ({"messages": ASKED, "label": True}, ["label = true", "select(.label) | del(.label)"]),
    "rated by a number": ({"instruction": "a", "output": "b", "label": 0}, ["label = 0", "select(.label == 1)"]),
    "rated ShareGPT": ({"conversations": SHARE, "kto_tag": False}, ["kto_tag = false", "preference"]),
    "a pair beside a completion": (
        {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}, ["--preference dpo"],
    ),
    "a pair of Alpaca": ({"instruction": "a", "chosen": "b", "rejected": "c"}, ["'. + {output: .chosen} | del("]),
    "a pair beside its beginning": (
        {"conversations": [*SHARE, SHARE[0]], "chosen": SHARE[1], "rejected": SHARE[1]},
        ["--preference dpo", "{conversations: (.conversations + [.chosen])}"],
    ),
    "messages of a pair": ({"prompt": "a", "chosen": ASKED, "rejected": ASKED}, ["{messages: .chosen}"]),
    "pictures beside ShareGPT": ({"conversations": SHARE, "images": ["a.png"]}, ["images = [\"a.png\"]", "text only"]),
    "a picture of LLaVA": ({"conversations": SHARE, "image": "a.png"}, ["image = \"a.png\"", "text only"]),
    "a sound": ({"instruction": "a", "output": "b", "audio": {"bytes": b"x"}}, ["audio = {", "text only"]),
    "a system text beside strings": (
        {"prompt": "a", "completion": "b", "system": "c"}, ["system = \"c\"", "jq -c '. + {prompt: [{role: \"user"],
    ),
    "tools beside strings": ({"prompt": "a", "completion": "b", "tools": [{}]}, ["tools = [{}]", "'. + {prompt:"]),
    "context beside Alpaca": (
        {"instruction": "a", "context": "b", "output": "c"}, ["context = \"b\"", "jq -c '.input = .context | del("],
    ),
    "context and input": (
        {"instruction": "a", "context": "b", "input": "d", "output": "c"},
        ["'.input = .context + \"\\n\" + .input | de"],
    ),
    "nothing asked": ({"instruction": "", "input": None, "output": "c"}, ["instruction = : is empty, and so is input"]),
    "questions": ({"question": "a", "answer": "b"}, ["answer, question", "content: .question}"]),
    "Dolly": ({"instruction": "a", "context": "b", "response": "c"}, ["{instruction, input: .context, output: .resp"]),
    "a list of records": ({"data": [{"messages": ASKED}]}, ["list of records under 'data'", "jq -c '.data[]'"]),
    "text": ({"text": "a"}, ["it has text", "hetero-megatron pretrain"]),
    "null": ({"messages": None}, ["messages: is null"]),
    "half a pair": ({"prompt": "a"}, ["completion: missing beside prompt"]),
    "half of Alpaca": ({"instruction": "a"}, ["output: missing beside instruction"]),
    "two forms": ({"messages": ASKED, "prompt": "a", "completion": "b"}, ["has messages and prompt"]),
    "two systems": ({"system": "a", "messages": BRIEF}, ["system = \"a\"", "begin with a system message"]),
    "system is no text": ({"system": 3, "messages": ASKED}, ["system = 3"]),
    "history": ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, ["history = [[", "Accepted: messages"]),
    "nothing to learn": ({"instruction": "a", "output": ""}, ["output = : is empty"]),
    "no text": ({"instruction": "a", "input": 5, "output": "b"}, ["input = 5: is no text"]),
    "an image": ({"messages": IMAGE}, ["messages[0].content[0].type = \"image\"", "text only"]),
    "empty": ({"conversations": []}, ["conversations = []: is empty", "select(.conversations != [])"]),
    "no list": ({"messages": "[nothing"}, ["messages = \"[nothing\": is not a list"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_other_records_are_refused_with_what_makes_them_readable(name: str) -> None:
    record, says = OTHER[name]
    with pytest.raises(UserError) as caught:
        read_conversation(record, "c.jsonl:1")
    assert not [word for word in ["c.jsonl:1", *says] if word not in str(caught.value)], caught.value
