"""Parts of content and calls of tools: what templates render of them is what was written, or they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hetero_megatron.data.chat.conversation import read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.errors import UserError
from tests.support.chat import chat_tokenizer

USER = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% set body %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content or [] %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ (c.function or c).name }} {{ (c.function or c).arguments | tojson }}"
    "{% endfor %}</s>{% endset %}{% if m.role == 'assistant' %}{% generation %}{{ body }}{% endgeneration %}"
    "{% else %}{{ body }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT, OBJECT = {"type": "text", "text": "fox"}, {"x": 1}


def answer(**keys: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **keys}]}


def called(**call: Any) -> dict[str, Any]:
    return answer(content=None, tool_calls=[call])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("pieces"), TEMPLATE)


def test_what_can_mean_one_thing_is_that(folder: Path) -> None:
    encoder, theirs = ChatEncoder(HuggingFaceTokenizer(str(folder))), AutoTokenizer.from_pretrained(folder)
    function = {"name": "f", "arguments": OBJECT}
    for written, meant in (
        (answer(content=["fox"]), answer(content=[TEXT])),
        (answer(content=[{"text": "fox"}, TEXT]), answer(content=[TEXT, TEXT])),
        (answer(content=[{**TEXT, "image": None, "loss": None, "cache_control": {"type": "ephemeral"}}]),
         answer(content=[TEXT])),
        (answer(content=["a ", {**TEXT, "loss": 1}]), answer(content=[{"type": "text", "text": "a "}, TEXT])),
        (called(function=function, name=None, args=None), called(function=function)),
        (called(**function, id="7", loss=True), called(**function)),
        (called(name="f", arguments={}), called(function={"name": "f", "arguments": {}})),
        (answer(content="fox", value="fox", **{"from": "gpt"}), answer(content="fox")),
        (answer(content="fox", value="", reasoning=[], thinking=False, annotations=[], **{"from": ""}),
         answer(content="fox")),
        (answer(content="fox", name=7, tool_calls="null"), answer(content="fox")),
        (called(function=function, name="", arguments=""), called(function=function)),
        ({"messages": [{"role": "user", "content": []}, *answer(content="fox")["messages"]]},
         {"messages": [{"role": "user", "content": ""}, *answer(content="fox")["messages"]]}),
        ({"conversations": [{"from": "human", "value": "hello", "role": None},
                            {"from": "gpt", "role": "assistant", "value": ["fox"], "content": None}]},
         answer(content=[TEXT])),
    ):  # fmt: skip
        want = theirs.apply_chat_template(meant["messages"])["input_ids"]
        conversation = read_conversation(written, "c:1")
        assert encoder.encode(conversation, "c:1").ids.tolist() == want, written
        assert encoder.unread(conversation) == [], written


MISSED: list[tuple[dict[str, Any], str]] = [
    (answer(content=[{"type": "text", "text": None}]), r"content\[0\].text .*missing"),
    (answer(content=[{"type": "text", "text": 5}]), r"content\[0\].text = 5: is no text"),
    (answer(content=[{"type": "text", "text": {"value": "fox"}}]), r"content\[0\].text = .*is no text"),
    (answer(content=[{"type": "text", "text": ["fox"]}]), r"content\[0\].text = .*is no text"),
    (answer(content=[{"type": "text"}]), r"content\[0\].text .*missing"),
    (answer(content=[{"type": "text", "content": "fox"}]), r"content\[0\].content = \"fox\": is not read: text is"),
    (answer(content=[TEXT, {"txt": "fox"}]), r"content\[1\].txt = \"fox\": is not read: text is"),
    (answer(content=[{"Text": "fox"}]), r"content\[0\].Text = \"fox\": is not read: text is"),
    (answer(content=[7]), r"content\[0\] = 7: is no part"),
    (answer(content=[None]), r"content\[0\] = null: is no part"),
    (answer(content=[["fox"]]), r"content\[0\] = .*is no part"),
    (answer(content=[{"type": "image_url", "image_url": "x"}]), r"content\[0\].type = \"image_url\": .*text only"),
    (answer(content=[{**TEXT, "audio": "x"}]), r"content\[0\].audio = \"x\": .*text only"),
    (answer(content=[{**TEXT, "type": ["text"]}]), r"content\[0\].type = .*text only"),
    (answer(content=[{"type": "input_text", "text": "fox"}]), r"content\[0\].type = .*such parts are not read"),
    (answer(content="fox", **{"from": "system"}), r"messages\[1\].from = \"system\": role beside it"),
    (answer(content="fox", name=True), r"name = true: is no text"),
    (answer(content="fox", thinking=3), r"thinking = 3: is no text"),
    (answer(content=[{**TEXT, "loss_mask": 0}, TEXT]), "marks of its parts"),
    (answer(content=[{**TEXT, "los_mask": 0}]), r"content\[0\].los_mask = 0: no such mark"),
    (answer(content=[{**TEXT, "mask": 1}]), r"content\[0\].mask = 1: programs differ"),
    (answer(content=[{**TEXT, "weight": 0.5}]), r"content\[0\].weight = 0.5: .*no weights in between"),
    (answer(content=[{**TEXT, "loss": False}], loss=True), "contradict the turn's own"),
    (answer(content="fox", reasoning_content=["fox"]), r"reasoning_content = .*is no text"),
    (answer(content="fox", tool_call=[{"name": "f"}]), r"tool_call = .*tool_calls only"),
    (called(name="f", args=OBJECT), r"tool_calls\[0\].args = .*is not read: arguments is"),
    (called(name="f", argments=OBJECT), r"tool_calls\[0\].argments = .*is not read: arguments is"),
    (called(name="f", input=OBJECT), r"tool_calls\[0\].input = .*is not read: arguments is"),
    (called(function={"name": "f", "parameters": OBJECT}), r"function.parameters = .*is not read: arguments is"),
    (called(function={"name": "f"}), r"function.arguments = .*missing"),
    (called(name="f", arguments=None), r"tool_calls\[0\].arguments = .*missing"),
    (called(name="f", arguments=[1]), r"tool_calls\[0\].arguments = .*no arguments"),
    (called(name="f", arguments=False), r"tool_calls\[0\].arguments = false: are no arguments"),
    (called(tool="f", arguments=OBJECT), r"tool_calls\[0\].tool = \"f\": is not read: name is"),
    (called(function={"tool_name": "f", "arguments": OBJECT}), r"function.tool_name = \"f\": is not read: name is"),
    (called(name="", arguments=OBJECT), r"tool_calls\[0\].name = \"\": is empty"),
    (called(name=5, arguments=OBJECT), r"tool_calls\[0\].name = 5: is no text"),
    (called(function="f", arguments=OBJECT), r"tool_calls\[0\].function = \"f\": is no object"),
    (called(function={"name": "f", "arguments": OBJECT}, arguments={"x": 2}), "function.arguments beside it"),
    (called(function={"name": "f", "arguments": OBJECT, "loss": False}, loss=1), "marks of its parts"),
    (answer(content="fox", tool_calls=[{"name": "f", "arguments": OBJECT, "train": False}]), "marks of its parts"),
    (called(name="f", arguments=OBJECT, type=[TEXT]), r"tool_calls\[0\].type = .*neither text nor a number"),
    (called(function={"name": "f", "arguments": OBJECT}, id={"id": 1}), r"tool_calls\[0\].id = .*neither text nor"),
    (answer(content="fox", value="dog"), r"messages\[1\].value = \"dog\": content beside it is \"fox\""),
    (answer(content="fox", **{"from": "human"}), r"messages\[1\].from = \"human\": role beside it is \"assistant\""),
    ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y", "content": "other"}]},
     r"conversations\[1\].value = \"y\": content beside it"),
    ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "role": "user", "value": "y"}]},
     r"conversations\[1\].from = \"gpt\": role beside it"),
]  # fmt: skip


def test_what_a_template_would_write_otherwise_is_refused() -> None:
    for record, says in MISSED:
        with pytest.raises(UserError, match=says):
            read_conversation(record, "c.jsonl:1")


def test_marks_of_all_pieces_are_the_turns(folder: Path) -> None:
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)))
    call = {"function": {"name": "f", "arguments": OBJECT, "loss": False}}
    for record in (
        answer(content=[{**TEXT, "loss": False}, {**TEXT, "train": 0}]), called(**call), called(**call, loss_mask=0),
        answer(content=[{**TEXT, "ignore": True}], tool_calls=[call]),
    ):  # fmt: skip
        record["messages"] += [USER, {"role": "assistant", "content": "dog"}]
        conversation = read_conversation(record, "c:1")
        encoded = encoder.encode(conversation, "c:1")
        assert conversation.marks == (None, False, None, None)
        text = encoder.tokenizer.decode(encoded.ids[np.asarray(encoded.counts)])
        assert "dog" in text and "fox" not in text and "f {" not in text


def test_other_keys_of_pieces_are_said_with_the_nearest(folder: Path) -> None:
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)))
    record = {
        **answer(content=[{**TEXT, "styl": "x"}], tool_calls=[{"name": "f", "arguments": {}, "indx": 1, "loss": None}]),
        "tools": [{"type": "function", "function": {"name": "f", "paramters": {"type": "object"}, "strict": True}}],
    }
    assert encoder.unread(read_conversation(record, "c:1")) == ["indx of tool_calls (index?)", "styl of parts"]
    with_tools = ChatEncoder(encoder.tokenizer, TEMPLATE.replace("| tojson", ""))
    assert "paramters of tools (parameters?)" in with_tools.unread(read_conversation(record, "c:1"))


def test_what_cannot_be_the_role_or_the_content_is_said(folder: Path) -> None:
    """A speaker's name, a rating: no record is refused for them."""
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)))
    for key, value in (("from", "Alice"), ("from", ["gpt"]), ("from", 3), ("value", 0.5), ("value", {"a": 1})):
        conversation = read_conversation(answer(content="fox", **{key: value}), "c:1")
        assert encoder.unread(conversation) == [f"{key} of turns"]
        want = encoder.encode(read_conversation(answer(content="fox"), "c:1"), "c:1").ids.tolist()
        assert encoder.encode(conversation, "c:1").ids.tolist() == want


def test_empty_content_beside_calls_is_no_list_of_python() -> None:
    for content in ([], ""):
        record = answer(content=content, tool_calls=[{"name": "f", "arguments": OBJECT}])
        assert read_conversation(record, "c:1").messages[1]["content"] == ""


def test_a_template_that_takes_no_parts_is_refused_or_given_text(folder: Path) -> None:
    """Parts that it would leave out without a word; a message that it leaves out in any form is its own matter."""
    strings = (
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{% generation %}"
        "{% if m.content is string %}{{ m.content }}{% endif %}</s>{% endgeneration %}{% endif %}{% endfor %}"
    )
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)), strings)

    def ids(record: dict[str, Any]) -> list[int]:
        return encoder.encode(read_conversation(record, "c:1"), "c:1").ids.tolist()

    assert ids(answer(content=[TEXT])) == ids(answer(content="fox"))
    system = {"role": "system", "content": ["be ", "brief"]}
    assert ids({"messages": [system, *answer(content="fox")["messages"]]}) == ids(answer(content="fox"))
    with pytest.raises(UserError, match="nothing of the parts of message 1"):
        ids(answer(content=[TEXT, TEXT]))
