"""Conversations of parts, calls and marks in the forms that people have; and whether what an accepted one says is
learned: every word of the assistant's is in the text, and nothing of Python is."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero_megatron.data.chat.marks import COUNTS, LISTS, SPARED

_BODY = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{% if p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}{% set f = c.function or c %}<call>"
    "{{ f.name }} {{ f.arguments if f.arguments is string else f.arguments | tojson }}</call>{% endfor %}<|im_end|>\n"
)
TEMPLATE = (  # of parts and calls
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}BODY"
    "{% endgeneration %}{% else %}BODY{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
).replace("BODY", _BODY)
ROWS = "rows.json"  # what a case's file holds, beside it
_MARKS = {*COUNTS, *SPARED, *LISTS}


def row(rng: random.Random) -> dict[str, Any]:
    """A record of parts and calls; most of the pieces as OpenAI has them."""
    words = (f"w{n}x{rng.randrange(100)}" for n in itertools.count())
    turns: list[dict[str, Any]] = [{"role": "user", "content": next(words)}]
    for _ in range(rng.randint(1, 2)):
        turn: dict[str, Any] = {"role": "assistant", "content": next(words)}
        if rng.random() < 0.6:
            turn["content"] = [_part(rng, words) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.5:
            turn["tool_calls"] = [_call(rng, words) for _ in range(rng.randint(1, 2))]
            turn["content"] = rng.choice((None, "", turn["content"]))
        if rng.random() < 0.15:
            turn |= rng.choice(({"value": next(words)}, {"from": "gpt"}, {"from": "human"}, {"content": None},
                                {"loss": rng.random() < 0.5}, {"tool_call": [_call(rng, words)]}))  # fmt: skip
        turns += [turn, {"role": "user", "content": [next(words)]}]
    if rng.random() < 0.2:
        names = {"role": "from", "content": "value"}
        return {"conversations": [{names.get(key, key): value for key, value in turn.items()} for turn in turns]}
    return {"messages": json.dumps(turns) if rng.random() < 0.1 else turns}


def _part(rng: random.Random, words: Iterator[str]) -> Any:
    word = next(words)
    plain = {"type": "text", "text": word}
    if rng.random() < 0.8:
        return plain
    return rng.choice((
        word, {"text": word}, {"type": None, "text": word}, {"type": "text", "content": word}, {"type": "text"},
        {"type": "text", "text": None}, {"type": "text", "text": {"value": word}}, {"type": "text", "text": [word]},
        {**plain, "loss": rng.random() < 0.5}, {**plain, "image": None}, {**plain, "loss_mask": 0}, {"txt": word},
        {**plain, "content": next(words)}, {"type": "input_text", "text": word}, {"Type": "text", "text": word}, 7,
        None, {"type": "text", "value": word}, {**plain, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": 5},
    ))  # fmt: skip


def _call(rng: random.Random, words: Iterator[str]) -> Any:
    name, arguments = next(words), {"x": next(words), "n": 1}
    inner = {"name": name, "arguments": arguments}
    if rng.random() < 0.75:
        return {"type": "function", "id": "1", "function": inner}
    return rng.choice((
        inner, {"function": {**inner, "arguments": json.dumps(arguments)}}, {"function": json.dumps(inner)},
        {"name": name, "args": arguments}, {"function": {"name": name, "parameters": arguments}}, {"name": name},
        {"tool": name, "arguments": arguments}, {"function": name, "arguments": arguments}, json.dumps(inner),
        {"function": inner, "loss": rng.random() < 0.5}, {"function": {**inner, "train": 0}}, {"function": {}},
        {"function": {"name": name}, "arguments": arguments}, {**inner, "input": {"y": next(words)}},
        {"name": name, "arguments": None}, {"name": None, "arguments": arguments},
        {"Name": name, "arguments": arguments}, {"function": inner, "name": next(words)}, {"name": name,
        "arguments": [arguments]},
    ))  # fmt: skip


def lost(words: list[str], said: str) -> str:
    """What of the assistant's words an accepted file does not teach, though nothing is said of it; empty: nothing.

    Args:
        said: what was printed: keys that are not read.
    """
    from hetero_megatron.data.chat.conversation import read_conversation
    from hetero_megatron.data.chat.encode import ChatEncoder
    from hetero_megatron.data.chat.records import find_records
    from hetero_megatron.data.tokenizers import HuggingFaceTokenizer

    path = Path(words[1])
    if not (path.parent / ROWS).is_file() or Path(words[2]).name != "pieces" or "not read" in said:
        return ""
    tokenizer = HuggingFaceTokenizer(words[2])
    encoder = ChatEncoder(tokenizer)
    texts = []
    for value, where in find_records(str(path), "--data-path").read():
        encoded = encoder.encode(read_conversation(value, where), where)
        texts.append(tokenizer.decode(encoded.ids[encoded.counts]))
    learned = "".join(texts)
    for record in json.loads((path.parent / ROWS).read_text()):
        if _MARKS & set(_keys(record)):
            continue
        for word in _answers(record):
            if word not in learned:
                return f"{word} is not learned: {learned[:120]}"
        if any(odd in learned for odd in ("None", "Undefined", "{'")) and "None" not in json.dumps(record):
            return f"words of Python are learned: {learned[:120]}"
    return ""


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        value = _parsed(value)
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(inner)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _answers(record: Any) -> Iterator[str]:
    """The words that :func:`row` made, of what the assistant says or calls."""
    for key in ("messages", "conversations"):
        turns = record.get(key) if isinstance(record, dict) else None
        turns = _parsed(turns) if isinstance(turns, str) else turns
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict) and "assistant" in (turn.get("role"), turn.get("from")):
                for name in ("content", "value", "tool_calls"):
                    yield from _words(turn.get(name))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        parsed = _parsed(value) if value[:1] in ("[", "{") else value
        if parsed is not value:
            yield from _words(parsed)
        elif value[:1] == "w" and "x" in value and value[1:2].isdigit():
            yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _words(inner)
