"""Which of several chat templates is taken, and what it is told: as transformers' apply_chat_template does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hetero_megatron.checkpoint.model_files import from_checkpoint, from_directory
from hetero_megatron.data.chat.build import read_template
from hetero_megatron.data.chat.conversation import read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.errors import UserError
from tests.support.chat import TEMPLATES, chat_tokenizer, turns

BODY = TEMPLATES["chatml"]
SEVERAL = {"default": BODY, "tool_use": "TOOLS {{ tools | tojson }} " + BODY, "rag": "{{ documents | tojson }} " + BODY}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ASKED = turns("hello", "fox")


def make(folder: Path, templates: dict[str, str], form: str) -> Path:
    """A tokenizer with several templates, in files or as a list in tokenizer_config.json."""
    chat_tokenizer(folder, None)
    if form == "list":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder
    (folder / "additional_chat_templates").mkdir()
    for name, text in templates.items():
        place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / place).write_text(text)
    return folder


def encode(folder: Path, record: dict[str, Any], given: str | None = None) -> list[int]:
    tokenizer = HuggingFaceTokenizer(str(folder))
    found = ChatEncoder(tokenizer, *read_template(given, tokenizer)).encode(read_conversation(record, "c:1"), "c:1")
    return [int(i) for i in found.ids]


@pytest.mark.parametrize("form", ["files", "list"])
def test_of_several_templates_the_one_of_transformers_is_taken(form: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "several", SEVERAL, form)
    theirs = AutoTokenizer.from_pretrained(folder)
    records: list[dict[str, Any]] = [{}, {"tools": [TOOL]}, {"tools": []}, {"tools": None}]
    for more in records:
        want = theirs.apply_chat_template(ASKED, **more)["input_ids"]
        assert encode(folder, {"messages": ASKED, **more}) == want, more
    as_text = {"tools": json.dumps([TOOL])}
    assert encode(folder, {"messages": ASKED, **as_text}) == encode(folder, {"messages": ASKED, "tools": [TOOL]})
    documents = [{"title": "a", "text": "b"}]
    for name in ("rag", "tool_use", "default"):
        want = theirs.apply_chat_template(ASKED, documents=documents, tools=[TOOL], chat_template=name)["input_ids"]
        record = {"messages": ASKED, "documents": documents, "tools": [TOOL]}
        assert encode(folder, record, name) == want
    (tmp_path / "own.jinja").write_text("own " + BODY)  # one that is given wins, also for records with tools
    want = theirs.apply_chat_template(ASKED, tools=[TOOL], chat_template="own " + BODY)["input_ids"]
    assert encode(folder, {"messages": ASKED, "tools": [TOOL]}, str(tmp_path / "own.jinja")) == want


def test_none_called_default_is_refused_with_the_names(tmp_path: Path) -> None:
    folder = make(tmp_path / "t", {"tool_use": SEVERAL["tool_use"], "rag": SEVERAL["rag"]}, "files")
    with pytest.raises(UserError, match="none called default: rag, tool_use"):
        encode(folder, {"messages": ASKED})
    encode(folder, {"messages": ASKED, "tools": [TOOL]})
    encode(folder, {"messages": ASKED}, "rag")


@pytest.mark.parametrize("form", ["files", "list"])
def test_all_of_several_templates_travel_in_a_native_checkpoint(form: str, tmp_path: Path) -> None:
    folder, native, back = make(tmp_path / "several", SEVERAL, form), tmp_path / "native", tmp_path / "back"
    for path in (native, back):
        path.mkdir()
    for name, content in from_directory(folder).native().items():
        (native / name).write_bytes(content)
    from_checkpoint(native, [path.name for path in native.iterdir()]).write(back)
    record = {"messages": ASKED, "tools": [TOOL]}
    assert encode(back, record) == encode(folder, record) != encode(back, {"messages": ASKED})
    assert HuggingFaceTokenizer(str(back)).chat_templates == SEVERAL


def test_options_of_a_record_reach_the_template(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "t", "{% if enable_thinking | default(false) %}T{% endif %}" + BODY)
    theirs = AutoTokenizer.from_pretrained(folder)
    for options in ({"enable_thinking": True}, {"enable_thinking": False}, {}):
        want = theirs.apply_chat_template(ASKED, **options)["input_ids"]
        assert encode(folder, {"messages": ASKED, "chat_template_kwargs": options}) == want
        assert encode(folder, {"messages": ASKED, "chat_template_kwargs": json.dumps(options)}) == want
    with pytest.raises(UserError, match="chat_template_kwargs.tools"):
        encode(folder, {"messages": ASKED, "chat_template_kwargs": {"tools": []}})


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "Oslo", "n": None}}}
ARGUMENTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c.function.name }}ARG{% endfor %}{% endif %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def calls(arguments: Any) -> dict[str, Any]:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    return {"messages": [turns("go")[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}


def test_arguments_are_given_in_the_form_that_the_template_takes(tmp_path: Path) -> None:
    """An object where it writes JSON, JSON text where it writes text: no dictionary of Python, no JSON in quotes."""
    value = {"x": "Oslo", "n": None}
    text = json.dumps(value)
    for name, written in (("json", "{{ c.function.arguments | tojson }}"), ("text", "{{ c.function.arguments }}"),
                          ("added", "{{ '' + c.function.arguments }}")):  # fmt: skip
        folder = chat_tokenizer(tmp_path / name, ARGUMENTS.replace("ARG", written))
        right = value if name == "json" else text
        want = AutoTokenizer.from_pretrained(folder).apply_chat_template(calls(right)["messages"])["input_ids"]
        assert encode(folder, calls(value)) == want and encode(folder, calls(text)) == want, name
    # Text that is no object stays as it is, and a null that someone wrote is one.
    folder = tmp_path / "json"
    theirs = AutoTokenizer.from_pretrained(folder)
    for odd in ("not JSON", "[1]", "7"):
        assert encode(folder, calls(odd)) == theirs.apply_chat_template(calls(odd)["messages"])["input_ids"]
    null = {"messages": [*calls(value)["messages"][:1], {**calls(value)["messages"][1], "content": None}]}
    assert encode(folder, null) == theirs.apply_chat_template(null["messages"])["input_ids"]


def test_parts_reach_a_template_that_takes_text(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "t", BODY.replace("m.content +", "m.content ~"))
    part = {"type": "text", "text": "hello"}
    want = encode(folder, {"messages": ASKED})
    assert encode(folder, {"messages": [{"role": "user", "content": [part]}, ASKED[1]]}) == want
    with pytest.raises(UserError, match="writes the parts of message 0 as a list of Python"):
        encode(folder, {"messages": [{"role": "user", "content": [part, part]}, ASKED[1]]})
    joined = "(m.content if m.content is string else m.content | map(attribute='text') | join)"
    parts = BODY.replace("m.content", joined)
    assert encode(chat_tokenizer(tmp_path / "p", parts), {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}, ASKED[1]
    ]}) == want  # fmt: skip
