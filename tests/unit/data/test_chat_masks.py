"""Which tokens of a conversation count: against transformers' own masks, for templates with marks and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hetero_megatron.data.chat.conversation import read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder, Encoded
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.errors import UserError
from tests.support.chat import CONVERSATIONS, FORGETFUL, TEMPLATES, chat_tokenizer, turns, unmarked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"])


def encode(folder: Path, template: str | None, record: dict[str, Any], **more: Any) -> Encoded:
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)), template, **more)
    return encoder.encode(read_conversation(record, "test:1"), "test:1")


def expected(folder: Path, template: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """(ids, mask) of transformers; the template has marks."""
    out = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
    )
    return out["input_ids"], [bool(m) for m in out["assistant_masks"]]


@pytest.mark.parametrize("marked", [True, False], ids=["marks", "comparison"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_transformers(name: str, messages: list[Any], marked: bool, folder: Path) -> None:
    template = TEMPLATES[name]
    ids, mask = expected(folder, template, messages)
    assert any(mask) and not all(mask)
    found = encode(folder, template if marked else unmarked(template), {"messages": messages})
    assert found.ids.tolist() == ids and found.counts.tolist() == mask


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "gemma"])
def test_system_messages_and_two_answers_in_a_row(name: str, folder: Path) -> None:
    messages = [*turns("hello", "one", system="be brief"), {"role": "assistant", "content": "two"}]
    ids, mask = expected(folder, TEMPLATES[name], messages)
    for template in (TEMPLATES[name], unmarked(TEMPLATES[name])):
        found = encode(folder, template, {"messages": messages})
        assert found.ids.tolist() == ids and found.counts.tolist() == mask


def test_a_template_that_changes_earlier_turns_is_refused(folder: Path) -> None:
    messages = turns("a", "<think>hm</think>yes", "b", "<think>so</think>no")
    with pytest.raises(UserError, match=r"message 1 .*generation"):
        encode(folder, FORGETFUL, {"messages": messages})
    found = encode(folder, FORGETFUL, {"messages": messages[:2]})  # a single answer is the last one
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(found.ids[found.counts]) == "<think>hm</think>yes<|im_end|>\n"


def test_the_template_is_found_where_transformers_writes_it(folder: Path, tmp_path: Path) -> None:
    assert (folder / "chat_template.jinja").exists()
    record = {"messages": CONVERSATIONS[0]}
    own = encode(folder, None, record)
    assert own.ids.tolist() == encode(folder, TEMPLATES["chatml"], record).ids.tolist()
    bare = chat_tokenizer(tmp_path / "bare", None)
    with pytest.raises(UserError, match="chat template"):
        encode(bare, None, record)


def test_forms_of_records_mean_the_same(folder: Path) -> None:
    messages = turns("hello", "fox", "dog", "says")
    share = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in messages]
    openai = {"messages": messages}
    forms: list[dict[str, Any]] = [{"conversations": share}, {"conversations": messages}, {**openai, "weight": "x"}]
    for template in (TEMPLATES["chatml"], unmarked(TEMPLATES["chatml"])):
        want = encode(folder, template, openai)
        for form in forms:
            found = encode(folder, template, form)
            assert np.array_equal(found.ids, want.ids) and np.array_equal(found.counts, want.counts)
        # Of a prompt with messages, no answer counts.
        found = encode(folder, template, {"prompt": messages[:3], "completion": messages[3:]})
        assert np.array_equal(found.ids, want.ids)
        last = np.flatnonzero(np.diff(want.counts.astype(int)) == 1)[-1] + 1
        assert np.array_equal(np.flatnonzero(found.counts), np.arange(last, len(want.ids))[want.counts[last:]])


def test_prompt_and_completion_as_text(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = encode(folder, None, {"prompt": "the quick", "completion": " brown fox"})
    assert tokenizer.decode(found.ids) == "the quick brown fox</s>"
    assert tokenizer.decode(found.ids[found.counts]) == " brown fox</s>"
    everything = encode(folder, None, {"prompt": "the quick", "completion": " brown fox"}, everything=True)
    assert everything.counts.all()


def test_tools_reach_the_template(folder: Path) -> None:
    template = "{{ tools | length }}" + TEMPLATES["chatml"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in ([tool], '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'):
        found = encode(folder, template, {"messages": CONVERSATIONS[0], "tools": tools})
        assert AutoTokenizer.from_pretrained(folder).decode(found.ids).startswith("1<|im_start|>")
