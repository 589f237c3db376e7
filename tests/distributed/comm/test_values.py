"""Values that ranks tell each other arrive as they were sent, or are refused; nothing in them is ever run."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_megatron.comm import Comm
from hetero_megatron.comm.group import decode, encode, together
from hetero_megatron.errors import UserError
from tests.support.pool import JobFailed, shared_pool


@dataclass(frozen=True)
class Point:
    name: str
    at: tuple[float, ...]
    inner: Point | None = None


SAMPLES: list[tuple[Any, Any]] = [
    (st.none(), None), (st.booleans(), bool), (st.integers(-(2**63), 2**63), int), (st.text(), str),
    (st.floats(), float), (st.lists(st.integers(0, 9)), list[int]), (st.lists(st.text()).map(tuple), tuple[str, ...]),
    (st.tuples(st.text(), st.booleans()), tuple[str, bool]),
    (st.dictionaries(st.text(), st.floats()), dict[str, float]),
    (st.dictionaries(st.integers(0, 99), st.text()), dict[int, str]), (st.none() | st.text(), str | None),
    (st.builds(Point, st.text(), st.lists(st.floats(allow_nan=False)).map(tuple)), Point),
]  # fmt: skip


@given(st.data())
def test_values_arrive_as_they_were_sent(data: st.DataObject) -> None:
    values, kind = data.draw(st.sampled_from(SAMPLES))
    try:
        value = data.draw(values)
        arrived = decode(encode(value), kind, "rank 1")
    except UserError as error:  # lone surrogates, which nothing could print
        assert "not Unicode" in str(error)
        return
    assert repr(arrived) == repr(value)  # NaN is not equal to itself


def test_dataclasses_nest() -> None:
    value = Point("a", (1.0, math.inf), Point("b", ()))
    assert decode(encode(value), Point, "rank 1") == value


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"1", str), (b'"1"', int), (b"true", int), (b"1", bool), (b"1.5", int), (b"null", str), (b"{}", Point),
        (b'{"name": "a", "at": 1, "inner": null}', Point), (b'{"name":"a","at":[],"inner":null,"more":1}', Point),
        (b"[1, 2, 3]", tuple[int, int]), (b'[["a", 1]]', dict[int, int]), (b"[]", dict[str, int] | str),
        (b"{", str), (b"", str), (b"\xff\xfe", str), (b"[" * 100_000, list[int]), (b"9" * 5000, int),
        (pickle.dumps({"a": 1}), dict[str, int]), (b'"\\ud800"', str),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_its_source(data: bytes, kind: Any) -> None:
    with pytest.raises(UserError, match="rank 7"):
        decode(data, kind, "rank 7")


def test_what_is_no_value_does_not_travel() -> None:
    for value in (Path("x"), {1, 2}, b"bytes", object(), ValueError("x"), {"a": complex(1)}):
        with pytest.raises(TypeError, match="does not travel"):
            encode(value)


# Between processes


def _exchange(comm: Comm) -> Any:
    everyone = tuple(range(8))
    comm.create_groups([everyone, (2, 5)])
    group = comm.group(everyone)
    long = "ä" * (comm.rank * 1000)  # of unlike lengths
    texts = group.gather_objects((comm.rank, long, None), tuple[int, str, None])
    pair = comm.group((2, 5)).gather_objects(Point(str(comm.rank), ()), Point) if comm.rank in (2, 5) else []
    background = comm.background_group(everyone)
    assert background is not None
    return texts == [(r, "ä" * r * 1000, None) for r in range(8)], [p.name for p in pair], background.gather_objects({})


def test_ranks_tell_each_other_values() -> None:
    for rank, (right, pair, background) in enumerate(shared_pool().run(_exchange)):
        assert right and pair == (["2", "5"] if rank in (2, 5) else []) and background == [{}] * 8


def _one_differs(comm: Comm) -> Any:
    comm.create_groups([tuple(range(8))])
    return comm.group(tuple(range(8))).gather_objects("three" if comm.rank == 3 else 3, int)


def _one_fails(comm: Comm) -> Any:
    comm.create_groups([tuple(range(8))])

    def action() -> int:
        if comm.rank in (3, 6):
            raise UserError("is full", field="--save", value=f"disk {comm.rank}", accepted="a larger one")
        return comm.rank

    return together(comm.group(tuple(range(8))), action, int)


@pytest.mark.slow
def test_one_rank_that_is_wrong_is_named_on_all() -> None:
    with pytest.raises(UserError, match='^rank 3 sent "three" for int'):
        shared_pool().run(_one_differs)
    with pytest.raises(UserError, match="^--save = disk 3: is full. Accepted: a larger one"):
        shared_pool().run(_one_fails)


def _sends_a_pickle(comm: Comm, mark: str) -> Any:
    """Rank 1 is taken over, and sends what Python's pickle would run."""
    from hetero_megatron.comm import comm as module

    comm.create_groups([tuple(range(8))])
    honest = module.encode
    if comm.rank == 1:
        module.encode = lambda value: pickle.dumps(_Bomb(mark))  # type: ignore[assignment]
    try:
        return comm.group(tuple(range(8))).gather_objects("fact", str)
    finally:
        module.encode = honest


class _Bomb:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.mark),))


@pytest.mark.slow
def test_a_pickle_from_a_peer_is_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    pickle.loads(pickle.dumps(_Bomb(str(mark))))
    assert mark.exists()
    mark.unlink()
    with pytest.raises((UserError, JobFailed), match="rank 1"):
        shared_pool().run(_sends_a_pickle, str(mark))
    assert not mark.exists()
