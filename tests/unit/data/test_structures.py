"""The same record from jsonl, parquet, Arrow and datasets is the same messages, tools and arguments to a template."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetero_megatron.data.chat.conversation import read_conversation
from hetero_megatron.data.chat.records import find_records
from hetero_megatron.errors import UserError
from tests.support.chat import turns

SCHEMA = {"type": "object", "properties": {"x": {"type": "a"}}}
TOOL = {"type": "function", "function": {"name": "sum", "parameters": SCHEMA}}


def record(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "go"}, answer, *turns("a", "b")], **more}


# Rows with other keys than their neighbours: a table fills them up with nulls.
ROWS = [
    record({"place": "Oslo"}, tools=[TOOL], system=None),
    record({"count": 3, "deep": {"list": [1, None], "text": "x"}}, tools=[{**TOOL, "strict": True}]),
    {"messages": [{"role": "user", "content": "a", "name": "Jo"}, {**turns("a", "b")[1], "loss": False}]},
    {"messages": turns("a", "b"), "system": "be brief", "tools": []},
]
PARTS = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]},
]  # fmt: skip


def read(path: Path | str) -> list[Any]:
    found = [read_conversation(value, where) for value, where in find_records(str(path), "--data-path").read()]
    return [(list(c.messages), c.tools, c.marks) for c in found]


def tables(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    """The rows as files of several kinds."""
    folder.mkdir()
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "list.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows, indent=1).encode())
    keys = dict.fromkeys(key for row in rows for key in row)
    table = pa.table({key: [row.get(key) for row in rows] for key in keys})
    pq.write_table(table, folder / "plain.parquet")
    with pa.OSFile(str(folder / "plain.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    columns = {key: [None if row.get(key) is None else json.dumps(row[key]) for row in rows] for key in keys}
    if "system" in columns:
        columns["system"] = [row.get("system") for row in rows]
    pq.write_table(pa.table(columns), folder / "text.parquet")  # a column of JSON text
    made = datasets.Dataset.from_list(rows)
    made.to_parquet(str(folder / "theirs.parquet"))
    made.save_to_disk(str(folder / "saved"))
    return {path.name: path for path in folder.iterdir() if path.name != "d.jsonl"}


def test_a_record_is_the_same_from_every_format(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    for name, rows in {"calls": ROWS, "parts": PARTS}.items():
        paths = tables(tmp_path / name, rows)
        want = read(tmp_path / name / "d.jsonl")
        assert len(want) == len(rows)
        for path in paths.values():
            assert read(path) == want, path
        (tmp_path / f"hub-{name}").mkdir()
        (tmp_path / f"hub-{name}" / "d.parquet").write_bytes(paths["theirs.parquet"].read_bytes())
        assert read(f"hub:{tmp_path / f'hub-{name}'}") == want


def test_columns_of_json_inside_of_structs_are_what_datasets_reads(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    value, any_json = datasets.Value("string"), datasets.Json()
    written = {"place": "Oslo", "nothing": None, "list": [None, {"a": None}]}  # its nulls are its own
    rows = [record(written, tools=[TOOL]), record({"n": 3}, tools=[{**TOOL, "strict": None}])]
    call = {"type": value, "function": {"name": value, "arguments": any_json}}
    for tools in (datasets.List(any_json), any_json, [any_json]):
        features = {"messages": [{"role": value, "content": value, "tool_calls": [call]}], "tools": tools}
        made = datasets.Dataset.from_dict({k: [r[k] for r in rows] for k in rows[0]}, datasets.Features(features))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        made.to_parquet(str(folder / "d.parquet"))
        made.save_to_disk(str(folder / "saved"))
        (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        want = read(folder / "d.jsonl")
        assert want[0][0][1]["tool_calls"][0]["function"]["arguments"] == written
        assert made[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == written
        for path in ("d.parquet", "saved"):
            assert read(folder / path) == want
        # As pyarrow without the type writes it: the schema's metadata say that it is JSON.
        table = pq.read_table(folder / "d.parquet")
        plain = pa.table(table.to_pydict(), metadata=table.schema.metadata)
        pq.write_table(plain, folder / "plain.parquet")
        assert read(folder / "plain.parquet") == want


def test_maps_and_other_types(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.int64())
    answer = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(pa.struct([
        ("function", pa.struct([("name", pa.string()), ("arguments", kind)]))
    ])))])  # fmt: skip
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [
        {"function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    ]}]]  # fmt: skip
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(answer))}), tmp_path / "map.parquet")
    [(messages, _, _)] = read(tmp_path / "map.parquet")
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1, "y": None}
    odd = [{**turn, "time": datetime.datetime(2026, 1, 1)} for turn in turns("a", "b")]
    pq.write_table(pa.table({"messages": [odd], "when": [datetime.date(2026, 1, 1)]}), tmp_path / "odd.parquet")
    with pytest.raises(UserError, match=r"odd\.parquet: row 0: messages\[0\]\.time = 2026-01-01.*of type datetime"):
        read(tmp_path / "odd.parquet")
    pq.write_table(pa.table({"messages": [turns("a", "b")], "when": [b"\0"]}), tmp_path / "fine.parquet")
    assert read(tmp_path / "fine.parquet")[0][0] == turns("a", "b")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": turns("a", "b"), "tools": "[1"}, r"tools = \"\[1\": not valid JSON"),
    ({"messages": turns("a", "b"), "tools": "{}"}, r"tools = \{\}: is not a list"),
    ({"messages": turns("a", "b"), "tools": ["f"]}, r"tools\[0\] = \"f\": is no object"),
    ({"messages": turns("a", "b"), "tools": [3]}, r"tools\[0\] = 3: is no object"),
    (record("{}", tools=[{"type": "function", "function": "f"}]), r"tools\[0\]\.function = \"f\": is no object"),
    ({"messages": [turns("a")[0], {"role": "assistant", "tool_calls": [7]}]}, r"messages\[1\]\.tool_calls\[0\] = 7"),
    ({"messages": [turns("a")[0], {"role": "assistant", "tool_calls": 7}]}, r"messages\[1\]\.tool_calls = 7"),
    ({"messages": turns("a", "b"), "documents": [3]}, r"documents\[0\] = 3"),
    ({"messages": turns("a", "b"), "documents": [{"text": ["a"]}]}, r"documents\[0\].text = .*: is no text"),
]


def test_what_is_no_tool_and_no_call_is_refused() -> None:
    for value, says in BAD:
        with pytest.raises(UserError, match=rf"^c:1: {says}"):
            read_conversation(value, "c:1")


def test_json_text_inside_of_a_record() -> None:
    call = json.dumps({"function": json.dumps({"name": "f", "arguments": '{"x": 1}'})})
    found = read_conversation({"messages": [turns("a")[0], {"role": "assistant", "tool_calls": json.dumps([call])}],
                               "tools": [json.dumps(TOOL)]}, "c:1")  # fmt: skip
    assert found.messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
    assert found.tools == [TOOL]
    text = {"type": "function", "function": {"name": "sum", "parameters": json.dumps(SCHEMA)}}
    assert read_conversation({"messages": turns("a", "b"), "tools": [text]}, "c:1").tools == [TOOL]


def test_a_number_that_nobody_reads_exactly_is_refused(tmp_path: Path) -> None:
    huge = "1" + "0" * 2000
    for name, text in {"d.jsonl": '{"messages": %s, "n": HUGE}\n', "d.json": '[{"messages": %s, "n": HUGE}]'}.items():
        (tmp_path / name).write_text((text % json.dumps(turns("a", "b"))).replace("HUGE", huge))
        with pytest.raises(UserError, match="a number of 2,001 digits"):
            read(tmp_path / name)


def test_columns_that_only_stand_for_what_is_meant_are_refused_as_text(tmp_path: Path) -> None:
    """The number of a class, a kind that datasets has and we do not; beside the turns they change nothing."""
    datasets.disable_progress_bars()
    label, text = datasets.ClassLabel(names=["no", "yes"]), datasets.Value("string")
    turn = {"role": text, "content": text}
    rows = {"prompt": ["a"], "completion": [1], "messages": [turns("a", "b")], "source": [1]}
    for features, kept, says in (
        ({"prompt": text, "completion": label}, ("prompt", "completion"), "completion = 1: .*of kind ClassLabel"),
        ({"messages": [turn], "source": label}, ("messages", "source"), None),
    ):
        made = datasets.Dataset.from_dict({key: rows[key] for key in kept}, datasets.Features(features))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        made.to_parquet(str(folder / "d.parquet"))
        made.save_to_disk(str(folder / "saved"))
        for path in (folder / "d.parquet", folder / "saved", f"hub:{folder}"):
            if isinstance(path, str):
                (folder / "saved").rename(tmp_path.parent / f"saved-{folder.name}")
            if says is None:
                assert read(path)[0][0] == turns("a", "b")
            else:
                with pytest.raises(UserError, match=says):
                    read(path)


def test_what_datasets_says_of_columns_is_read_or_refused(tmp_path: Path) -> None:
    table = pa.table({"messages": [turns("a", "b")], "n": [1]})
    plain = {"messages": [{"role": {"dtype": "string", "_type": "Value"}}], "n": {"dtype": "int64", "_type": "Value"}}
    content = {"content": {"_type": "Hologram"}}
    for features, says in (
        (plain, None), ({**plain, "n": {"_type": "Hologram"}}, None), (None, None),
        ({"messages": [content]}, r"messages\[0\]\.content = a: a column of kind Hologram"),
        ({"messages": {"_type": "List", "feature": content}}, r"content = a: a column of kind Hologram"),
        ({"messages": {"_type": "Image"}}, "messages = .*a column of kind Image"),
        ("{", "what datasets says of the columns is damaged: not valid JSON"), ("[]", "describes no columns"),
        ([1], "describes no columns"), ({"messages": 7}, "describes no columns"), ("7", "describes no columns"),
    ):  # fmt: skip
        text = features if isinstance(features, str) else json.dumps({"info": {"features": features}})
        pq.write_table(table.replace_schema_metadata({"huggingface": text}), tmp_path / "d.parquet")
        if says is None:
            assert read(tmp_path / "d.parquet")[0][0] == turns("a", "b")
        else:
            with pytest.raises(UserError, match=says):
                read(tmp_path / "d.parquet")


def test_values_of_answers_that_no_text_has_are_refused(tmp_path: Path) -> None:
    sides = {side: [[*turns("a"), {"role": "assistant", "content": text}]] for side, text in
             (("chosen", b"\0"), ("rejected", b"\1"))}  # fmt: skip
    pq.write_table(pa.table(sides), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"chosen\[0\]\.content = .*of type bytes"):
        list(find_records(str(tmp_path / "d.parquet"), "--data-path").read())
