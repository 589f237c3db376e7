"""Differences of weights in few bits, against NumPy from the rule alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.layout import Box
from hetero_megatron.parallel.compress import Codes, decode, encode, from_bytes, size_of, to_bytes
from tests.support import compress_reference as reference

KINDS = ("bf16", "int8", "int4")
DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def box_at(rows: int, first: int, columns: int) -> Box:
    return Box((3, first), (3 + rows, first + columns))


@st.composite
def values_of_boxes(draw: st.DrawFn) -> tuple[np.ndarray, Box]:
    """Magnitudes from the least to the largest of fp32, some blocks zero."""
    box = box_at(draw(st.integers(1, 3)), draw(st.integers(0, 130)), draw(st.integers(1, 200)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    power = draw(st.sampled_from([0, -3, 30, -140, -126, 127, None]))
    powers = rng.integers(-149, 128, box.shape) if power is None else power
    values = rng.uniform(-1, 1, box.shape) * np.exp2(np.asarray(powers, np.float64)) * 2
    values[rng.random(box.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    top = np.finfo(np.float32).max
    return np.clip(values, -top, top), box


@settings(max_examples=60, deadline=None)
@given(values_of_boxes(), st.sampled_from(KINDS), st.sampled_from(list(DTYPES)))
def test_decoded_values_are_the_rules_and_no_further_off(
    made: tuple[np.ndarray, Box], compress: str, dtype: torch.dtype
) -> None:
    values, box = made[0].astype(DTYPES[dtype]), made[1]
    codes = encode(torch.from_numpy(values), box, compress)
    got = decode(codes, dtype).numpy()
    assert (got == reference.decoded(values, box, compress)).all()
    assert np.isfinite(got).all() and (got[values == 0] == 0).all()
    off = np.abs(got.astype(np.float64) - values.astype(np.float64))
    if compress == "bf16":
        assert (off <= np.maximum(np.abs(values) * 2.0**-8, 2.0**-134)).all()  # half of its least number
    else:
        assert codes.scales is not None
        column = np.arange(box.lo[1], box.hi[1]) // reference.BLOCK - box.lo[1] // reference.BLOCK
        assert (off <= 0.5 * (1 + 1e-4) * codes.scales.numpy()[:, column]).all()

    # A message of any parts of it says the same, wherever it begins in memory.
    middle = box_at(1, (box.lo[1] + box.hi[1]) // 2, box.hi[1] - (box.lo[1] + box.hi[1]) // 2)
    boxes = [box, middle, middle]
    message = to_bytes([codes.part(inner) for inner in boxes], compress)
    assert message.dtype == torch.uint8 and message.numel() == size_of(boxes, compress)
    for inner, came in zip(boxes, from_bytes(torch.cat([message[:1], message])[1:], boxes, compress), strict=True):
        assert (decode(came, dtype).numpy() == got[inner.slices(box)]).all()


def test_blocks_are_the_tensors_own_however_it_is_cut_between_them() -> None:
    values = torch.from_numpy(np.random.default_rng(5).standard_normal((4, 300))).float()
    whole = Box((0, 0), (4, 300))
    for compress in KINDS:
        want = decode(encode(values, whole, compress), torch.float32)
        for (a, b), (c, d) in itertools.product([(0, 1), (1, 4)], [(0, 64), (64, 256), (256, 300)]):
            part = encode(values[a:b, c:d], Box((a, c), (b, d)), compress)
            assert torch.equal(decode(part, torch.float32), want[a:b, c:d])


def test_bytes_of_a_message_are_told_by_hand() -> None:
    boxes = [Box((5,), (6,)), Box((0, 60), (2, 130))]  # one element; two rows over the ends of two blocks
    assert {kind: size_of(boxes, kind) for kind in KINDS} == {
        "bf16": 2 * 141, "int8": 4 * (1 + 2 * 3) + 141, "int4": 4 * (1 + 2 * 3) + 71
    }  # fmt: skip


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    for compress, dtype in itertools.product(KINDS, DTYPES):
        values = torch.ones(2, 128, dtype=dtype)
        values[1, 70] = bad
        got = decode(encode(values, Box((0, 0), (2, 128)), compress), dtype)
        assert not got[1, 70].isfinite() and got[0].isfinite().all() and got[1, :64].isfinite().all()
        assert compress == "bf16" or not got[1, 64:].isfinite().any()


def test_one_element_and_larger_than_fp32() -> None:
    one = Box((0,), (1,))
    for compress in KINDS:
        for value in (0.0, -1e-45, 3.4028234663852886e38):
            values = np.array([value], np.float32)
            got = decode(encode(torch.from_numpy(values), one, compress), torch.float32).numpy()
            assert got == reference.decoded(values, one, compress), (compress, value)
        huge = decode(encode(torch.tensor([-1e300], dtype=torch.float64), one, compress), torch.float64)
        assert -3.41e38 < huge.item() < -3.3e38  # error feedback has the rest
    assert isinstance(encode(torch.ones(1), one, "int8"), Codes)
