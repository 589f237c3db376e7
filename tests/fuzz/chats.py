"""Conversations and chat templates: records and tables that are nearly right, templates that are hostile."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz import mutate, pieces

_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "Oslo", "n": 3, "z": None}}}
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_TURNS = [
    {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello", "name": "Jo"},
    {"role": "assistant", "content": "fox", "loss": True},
    {"role": "user", "content": [{"type": "text", "text": "dog"}]},
    {"role": "assistant", "content": "says", "weight": 1},
]  # fmt: skip
RECORDS: list[dict[str, Any]] = [
    {"messages": _TURNS, "id": 7},
    {"messages": _TURNS[1:3], "loss_mask": [0, 1], "tools": [_TOOL], "documents": [{"title": "a", "text": "b"}]},
    {"messages": [_TURNS[1], {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                  {"role": "tool", "content": "4", "tool_call_id": "1"}, _TURNS[2]], "tools": [_TOOL]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "loss": 0}], "system": "s"},
    {"prompt": "a", "completion": "b"},
    {"prompt": _TURNS[:2], "completion": _TURNS[2:3], "chat_template_kwargs": {"enable_thinking": False}},
    {"instruction": "a", "input": "b", "output": "c", "history": []},
    {"messages": json.dumps(_TURNS), "tools": json.dumps([_TOOL])},
]  # fmt: skip
_KEYS = ("loss", "loss_mask", "train", "weight", "mask", "ignore", "los", "tools", "documents", "images", "label",
         "system", "tool_calls", "function_call", "from", "value", "text", "type", "arguments")  # fmt: skip
_MARKS = (True, False, 0, 1, 0.5, "false", None, 2, [0, 1], {}, "x", -1, [0.5, None])


def record(rng: random.Random, folder: Path, base: Path) -> list[str]:
    """A file of a few records, as lines, as a list or as a table."""
    rows = []
    base = base.parent / rng.choice(("chat", "pieces", "pieces"))
    for _ in range(rng.randrange(1, 3)):
        row = pieces.row(rng) if base.name == "pieces" else copy.deepcopy(rng.choice(RECORDS))
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            row = mutate.tree(rng, row)
        if isinstance(row, dict) and rng.random() < 0.4:
            lists = [value for value in row.values() if isinstance(value, list)]
            turns = [turn for turns in lists for turn in turns if isinstance(turn, dict)]
            rng.choice([row, *turns])[rng.choice(_KEYS)] = rng.choice(_MARKS)
        rows.append(row)
    (folder / pieces.ROWS).write_text(json.dumps(rows))
    path = folder / rng.choice(("d.jsonl", "d.json", "d.parquet", "d.arrow"))
    if path.suffix in (".parquet", ".arrow") and _table(path, rows):
        return _words(path, base)
    path = path.with_suffix(".jsonl") if path.suffix != ".json" else path
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    content = text.encode()
    if rng.random() < 0.1:
        content = mutate.bytes_of(rng, content)
        (folder / pieces.ROWS).unlink()
    path.write_bytes((b"\xef\xbb\xbf" if rng.random() < 0.1 else b"") + content)
    return _words(path, base)


def _table(path: Path, rows: list[Any]) -> bool:
    """Whether the rows could be written as a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pa.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        path.unlink(missing_ok=True)
        return False
    return True


_NUMBERS = ("0", "-1", "7", "10 ** 10", "10 ** 400", "2 ** 63", "1e308", "99999", "10 ** 10 ** 8", "(0 - 1) ** 0.5")
_TEXTS = ("'x'", "''", "'\\ud800'", "'%s'", "'{0.__class__}'", "'é' * 1000", "bos_token", "messages[0].content",
          "'a,b'")  # fmt: skip
_FILTERS = (
    "length", "tojson", "tojson(indent=N)", "center(N)", "indent(N)", "batch(N)", "batch(N, T)", "slice(N)", "join(T)",
    "replace('', T)", "format(N)", "list", "string", "int", "float", "round(N)", "abs", "first", "last", "sort", "sum",
    "unique", "reverse", "map(attribute=T)", "map('upper')", "selectattr(T)", "groupby(T)", "wordwrap(N)", "urlize",
    "truncate(N)", "filesizeformat", "pprint", "random", "xmlattr", "dictsort", "attr(T)", "trim", "title",
    "default(N)",
)  # fmt: skip
_METHODS = ("upper()", "center(N)", "ljust(N)", "zfill(N)", "split(T)", "join([T, T])", "format(N, T)", "encode(T)",
            "replace(T, T * 99)", "expandtabs(N)", "items()", "append(N)", "__class__", "__init__.__globals__",
            "mro()", "count(T)", "format_map(messages)", "get(T)", "x", "0")  # fmt: skip
_OBJECTS = ("messages", "messages[0]", "tools", "namespace()", "dict()", "range(99999)", "self", "cycler", "loop",
            "lipsum(n=N)", "raise_exception(T)", "strftime_now(T)", "none", "[1, 2]", "{'a': N}",
            "joiner(T)")  # fmt: skip


def _expression(rng: random.Random, depth: int) -> str:
    inner: Callable[[], str] = lambda: _expression(rng, depth - 1)  # noqa: E731
    atoms: tuple[str, ...] = (*_NUMBERS, *_TEXTS, *_OBJECTS)
    if depth <= 0:
        text = rng.choice(atoms)
    else:
        text = rng.choice((
            f"({inner()} {rng.choice(('+', '-', '*', '/', '//', '%', '**', '~', 'in', 'and', '==', '<'))} {inner()})",
            f"({inner()} | {rng.choice(_FILTERS)})", f"({inner()}).{rng.choice(_METHODS)}", f"({inner()})[{inner()}]",
            f"[{inner()}, {inner()}]", f"({inner()} if {inner()} else {inner()})", inner(),
        ))  # fmt: skip
    return text.replace("N", rng.choice(_NUMBERS)).replace("T", rng.choice(_TEXTS))


def _statement(rng: random.Random, depth: int) -> str:
    inner = _statement(rng, depth - 1) if depth > 0 else f"{{{{ {_expression(rng, 1)} }}}}"
    expression = _expression(rng, rng.randrange(1, 4))
    return rng.choice((
        f"{{{{ {expression} }}}}", f"{{% for x in {expression} %}}{inner}{{% endfor %}}",
        f"{{% for x in range(99999) %}}{inner}{{% endfor %}}", f"{{% set y = {expression} %}}{inner}",
        f"{{% set n = namespace(x={expression}) %}}{{% for i in range(60) %}}{{% set n.x = n.x ~ n.x %}}{{% endfor %}}",
        f"{{% if {expression} %}}{inner}{{% else %}}{{{{ y }}}}{{% endif %}}",
        f"{{% macro f(n) %}}{inner}{{{{ f(n - 1) }}}}{{% endmacro %}}{{{{ f(9) }}}}",
        f"{{% generation %}}{inner}{{% endgeneration %}}", f"{{% include {expression} %}}", f"{{% call f() %}}{inner}",
        f"{{% filter upper %}}{inner}{{% endfilter %}}", f"{{% raw %}}{inner}{{% endraw %}}{{% break %}}",
    ))  # fmt: skip


def template(rng: random.Random, folder: Path, base: Path) -> list[str]:
    """A sound template with something hostile in it, beside sound records."""
    body = (base / "chat_template.jinja").read_text()
    at = rng.choice((0, len(body), body.index("%}") + 2))
    text = body[:at] + _statement(rng, rng.randrange(3)) + body[at:]
    if rng.random() < 0.1:
        text = mutate.bytes_of(rng, text.encode()).decode("utf-8", "replace")
    (folder / "t.jinja").write_text(text)
    rows = [{"messages": _TURNS[:3], "tools": [_TOOL]}, {"messages": _TURNS[1:3]}]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*_words(folder / "d.jsonl", base), str(folder / "t.jinja")]


def _words(path: Path, base: Path) -> list[str]:
    return ["chat", str(path), str(base)]


def encode(words: list[str]) -> int:
    """Read and encode conversations as ``finetune`` does before the first step. UserError: it refuses."""
    from hetero_megatron.data import DataConfig, build_datasets

    config = DataConfig(
        data_path=(words[1],), split="1", sft=True, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=words[2],
        chat_template=words[3] if len(words) > 3 else None,
    )  # fmt: skip
    build_datasets(config, 256, 1, (2, 0, 0), 512, log=print)
    return 0
