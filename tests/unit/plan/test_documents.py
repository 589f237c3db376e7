"""Plan and cluster files as YAML and JSON: what is read is what is written, and nothing that is read can hurt."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from hetero_megatron.cluster import cluster_from_dict, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import load_plan, plan_from_dict
from hetero_megatron.utils.files import MAX_DEPTH, member, parse_json, read_json, read_text
from hetero_megatron.utils.yaml_document import QuotingDumper, parse_document, read_document
from tests.unit.plan.test_bad_input import small_spec

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8)
SCALARS |= st.text("0123456789eE+-.", max_size=12)
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=4),
    max_leaves=20,
)


def refusal(text: str, name: str = "a.yaml") -> str:
    with pytest.raises(UserError) as caught:
        parse_document(text, name)
    message = str(caught.value)
    assert message.startswith(name) and len(message) < 500 and message.isprintable()
    return message


@given(VALUES)
@example("97140e616973")  # a fingerprint
def test_what_is_written_is_what_is_read(value: Any) -> None:
    """1e5 is a number here, as in YAML 1.2; PyYAML takes it for a word, and would write the word so."""
    assert parse_document(yaml.dump({"a": value}, Dumper=QuotingDumper), "a.yaml").plain() == {"a": value}


@given(VALUES)
def test_what_json_writes_is_what_is_read(value: Any) -> None:
    for ascii_only in (True, False):
        text = json.dumps({"a": value}, ensure_ascii=ascii_only, indent=1)
        assert parse_document(text, "a.json").plain() == {"a": value}


@pytest.mark.parametrize("word", ["1:04", "190:20:30", "010", "0b11", "on", "yes", "No", "2024-01-01", "1e", "0x"])
def test_what_yaml_1_1_would_turn_into_something_else_stays_a_word(word: str) -> None:
    assert parse_document(f"a: {word}", "a.yaml").plain() == {"a": word}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e3", 1000.0), ("-.5", -0.5), ("1.", 1.0), ("1_000", 1000), ("+7", 7), ("TRUE", True), ("~", None)],
)
def test_scalars(text: str, value: object) -> None:
    found = parse_document(f"a: {text}", "a.yaml").plain()["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("spelling", ["'{}'", '"{}"', "!!str {}"])
def test_quoted_and_tagged_numbers_are_text(spelling: str) -> None:
    assert parse_document("a: " + spelling.format("12"), "a.yaml").plain() == {"a": "12"}


def bomb(levels: int, width: int) -> str:
    lines = [f"a0: &a0 [{','.join(['x'] * width)}]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


HOSTILE = {
    "brackets": ("[" * 200_000, "nested too deeply"),
    "braces": ("{a: " * 100_000, "nested too deeply"),
    "dashes": ("- " * 5_000 + "x", "nested too deeply"),
    "bomb": (bomb(9, 9), "too many values"),
    "narrow bomb": (bomb(22, 2), "too many values"),
    "bomb of mappings": (
        "b0: &b0 {x: 1}\n" + "\n".join(f"b{i}: &b{i} {{x: *b{i - 1}, y: 1}}" for i in range(1, 30)),
        "nested too deeply",
    ),
    "alias of itself": ("a: &a {b: *a}", "contains itself"),
    "unknown alias": ("a: *nothing", "not defined"),
    "digits": ("a: " + "9" * 5_000, "a number of 5,000 digits"),
    "infinite": ("a: {b: [1, .inf]}", "a.b[1]: .inf is not finite"),
    "NaN": ("a: .NaN", "a: .NaN is not finite"),
    "too large for fp64": ("a: 1e999", "a: 1e999 is not finite"),
    "tag of a word": ("a: !!bool xyz", "a: the tag !!bool does not fit"),
    "tag of Python": ("a: !!python/object/apply:os.system [ls]", "!!python/object/apply:os.system does not fit"),
    "list as key": ("? [1, 2]\n: x", "a key has to be a word"),
    "alias as key": ("a: &a 1\n? *a\n: 2", "a key has to be a word"),
    "two documents": ("a: 1\n---\na: 2", "a second document"),
    "twice in a list": ("a: [{b: 1, b: 2}]", "a[0].b: the key is written twice"),
    "escape": ('"\\e[2J": 1\n"\\e[2J": 2', r"\x1b[2J: the key is written twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_at_once(name: str) -> None:
    text, says = HOSTILE[name]
    start = time.process_time()
    assert says in refusal(text)
    assert time.process_time() - start < 20  # of this process alone; expanded, these take hours


def test_aliases_within_bounds_are_values() -> None:
    found = parse_document("a: &a [1, {b: 2}]\nc: [*a, *a]", "a.yaml")
    assert found.plain() == {"a": [1, {"b": 2}], "c": [[1, {"b": 2}]] * 2}
    assert found.value["c"].value[1].value[1].value["b"].path == "c[1][1].b"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 1_000 + "1" + "}" * 1_000, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)]
)
def test_deep_json(text: str) -> None:
    with pytest.raises(UserError, match="nested too deeply"):
        parse_json(text, "a.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1" * 5_000, "5,000 digits"),
        ('{"\\ud800": 1}', "lone surrogate"),
        ('["\\udc00"]', "lone surrogate"),
        ("{", "not valid JSON"),
    ],
)
def test_json_that_cannot_be_used(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_json(text, "a.json")
    str(caught.value).encode()


@pytest.fixture
def odd_files(tmp_path: Path) -> list[Path]:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "broken").symlink_to(tmp_path / "absent")
    (tmp_path / "device").symlink_to("/dev/zero")
    return [tmp_path / name for name in ("fifo", "directory", "circle", "broken", "device", "absent", "nul\0")]


def test_only_regular_files_are_read_and_nothing_blocks(odd_files: list[Path]) -> None:
    for path in odd_files:
        for read in (read_document, read_text, read_json, load_cluster):
            with pytest.raises(UserError, match="cannot read the file"):
                read(path)


def test_files_of_a_directory_stay_in_it(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "models--a" / "snapshots" / "0123"
    for directory in (model, cache, tmp_path / "models--a" / "blobs"):
        directory.mkdir(parents=True)
    for path in (tmp_path / "secret", model / "plain", tmp_path / "models--a" / "blobs" / "feed"):
        path.write_text("x")
    (model / "inner").symlink_to("plain")
    (model / "leaves").symlink_to(tmp_path / "secret")
    (model / "twice").symlink_to("leaves")
    (cache / "blob").symlink_to("../../blobs/feed")
    (cache / "leaves").symlink_to("../../../secret")
    for directory, name in ((model, "plain"), (model, "inner"), (cache, "blob")):
        assert member(directory, name).read_text() == "x"
    for directory, name in (
        (model, "../secret"), (model, "a/../../secret"), (model, str(tmp_path / "secret")), (model, "leaves"),
        (model, "twice"), (cache, "leaves"), (model, ""), (model, "a\0b"),
    ):  # fmt: skip
        with pytest.raises(UserError, match="outside its directory"):
            member(directory, name)


@pytest.mark.parametrize("text", ["[1, 2", "9" * 25, "1.5", "on", "1:30", "true", "-1", str(2**63)])
def test_ranks_and_degrees_are_integers_as_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    stage = f"{{ranks: [0], layers: [0, 6], tp: {text}}}"
    path.write_text(
        "seq_length: 64\nglobal_batch_size: 1\npipelines:\n- micro_batch_size: 1\n  num_micro_batches: 1\n"
        f"  stages:\n  - {stage}\n"
    )
    with pytest.raises(UserError, match=r"plan\.yaml:\d+"):
        load_plan(path, small_spec())


def one_pipeline(stages: list[dict[str, Any]], micro_batches: int = 1, **more: Any) -> dict[str, Any]:
    pipeline = {"micro_batch_size": 1, "num_micro_batches": micro_batches, "stages": stages, **more}
    return {"seq_length": 64, "global_batch_size": micro_batches * more.get("repeat", 1), "pipelines": [pipeline]}


WHOLE = {"ranks": 0, "layers": [0, 6]}
MANY = {"ranks": "0-99999", "layers": [0, 6], "tp": 100_000}
LARGE = {
    "repeat": (one_pipeline([WHOLE], repeat=10**6), "pipelines[0].repeat"),
    "repeat beyond int64": (one_pipeline([WHOLE], repeat=10**20), "pipelines[0].repeat"),
    "range": (one_pipeline([{**WHOLE, "ranks": "0-999999999"}]), "pipelines[0].stages[0].ranks"),
    "ranges": (one_pipeline([{**WHOLE, "ranks": ["0-99999", "100000-199999"]}]), "pipelines[0].stages[0].ranks"),
    "text of ranges": (one_pipeline([{**WHOLE, "ranks": ",".join(["0-99999"] * 9)}]), "pipelines[0].stages[0].ranks"),
    "pipelines": (one_pipeline([WHOLE]) | {"pipelines": 2 * one_pipeline([MANY])["pipelines"]}, "pipelines[1]"),
    "micro-batches": (one_pipeline([WHOLE], micro_batches=10**12), "pipelines[0].num_micro_batches"),
}


@pytest.mark.parametrize("name", LARGE)
def test_sizes_are_bounded_before_anything_is_built(name: str) -> None:
    plan, field = LARGE[name]
    with pytest.raises(UserError) as caught:
        plan_from_dict(plan, small_spec())
    assert caught.value.field == field


def cluster(**over: Any) -> dict[str, Any]:
    chip = {"memory": "1 GiB", "tflops": {"fp32": 1.0}, "memory_bandwidth": "10 GB/s", **over.pop("chip", {})}
    return {"nodes": [{"name": "a", "chip": "c", "count": 2}], "chips": {"c": chip}, **over}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 0, 1e300, 1e-300, True, "1", [1], None, 10**400])
@pytest.mark.parametrize("where", ["tflops", "cost_per_hour", "speed", "rates"])
def test_numbers_of_a_cluster_file_are_finite_and_plausible(where: str, value: Any) -> None:
    if where == "rates" and value in (-1, 0, True, "1", [1], None):
        pytest.skip("checked where rates are used")
    chips = {
        "tflops": {"tflops": {"fp32": value}}, "cost_per_hour": {"cost_per_hour": value},
        "speed": {"emulate": {"speed": value}}, "rates": {"rates": {"fp32": {"gemm": [[1, 2, value]]}}},
    }  # fmt: skip
    with pytest.raises(UserError) as caught:
        cluster_from_dict(cluster(chip=chips[where]))
    assert caught.value.field.startswith("chips.c.")


@pytest.mark.parametrize("number", ["1e300", "-1", "0", "1e-30", "nan", "inf", "9" * 400, ".."])
def test_quantities_are_finite_and_plausible(number: str) -> None:
    with pytest.raises(UserError, match="links.inter_node.bandwidth"):
        cluster_from_dict(cluster(links={"inter_node": {"bandwidth": f"{number} GB/s"}}))


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\u202e", "x" * 1000, 7, ["a"], {"a": 1}, None, ""])
def test_names_are_printable(name: Any) -> None:
    with pytest.raises(UserError) as caught:
        cluster_from_dict({"nodes": [{"name": name, "chip": "A100-80-SXM"}]})
    assert str(caught.value).isprintable() and caught.value.field == "nodes[0].name"
