"""What physics forbids of a measured card: rates above those of its data sheet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from hetero_megatron.cluster.card_entries import Measurement
from hetero_megatron.cluster.catalogue import CHIPS
from hetero_megatron.plans.matrices import matrix_flops
from hetero_megatron.predictor.cost.modelled_operators import UPDATE_BYTES
from hetero_megatron.predictor.cost.rates import checked_rates, model_fingerprint
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import head_flops, layer_flops, projection_elements, visible_pairs
from hetero_megatron.spec.presets import load_model, preset_names
from hetero_megatron.utils.yaml_document import Entry

TOLERANCE = 1.05  # boards boost by a little more than the clock of the data sheet
MOVED = {"pack_beta": 2, "add_beta": 3, "unpack_beta": 2}  # bytes per byte that is packed, added up or unpacked


def check_card(one: Measurement) -> None:
    """UserError: malformed rates, or one that is faster than the data sheet's peak in its dtype, or its memory; or of
    a dtype of which the data sheet says nothing."""
    dtype, chip = "fp8" if one.dtype.startswith("fp8_") else one.dtype, CHIPS[one.card]
    checked_rates(one.entry, one.dtype)
    peak, memory = chip.flops.get(dtype), chip.memory_bandwidth
    if peak is None or memory is None:
        accepted = f"one of {', '.join(chip.flops)}" if chip.flops else "a card whose data sheet is in docs/chips.md"
        one.entry.fail(f"the data sheet of {one.card} says nothing of {dtype} to check them by", accepted=accepted)
    for key, entry in one.entry.value.items():
        if key in ("gemm_flops", "attention_flops"):
            _at_most(entry, entry.value, peak, f"FLOP/s in {dtype}")
        elif key == "gradient_speed":
            _at_most(entry, entry.value * one.rates.get("gemm_flops", 0.0), peak, f"FLOP/s in {dtype}")
        elif key == "bytes_per_second":
            _at_most(entry, entry.value, memory, "bytes per second")
        elif key in MOVED and entry.value:
            _at_most(entry, MOVED[key] / entry.value, memory, "bytes per second")
        elif key in ROWS:
            for row in entry.items():
                for seconds, work, of_memory in ROWS[key]([cell.value for cell in row.items()], row):
                    limit, unit = (memory, "bytes per second") if of_memory else (peak, f"FLOP/s in {dtype}")
                    _at_most(row, work / seconds, limit, unit)


def _at_most(entry: Entry, rate: float, limit: float, unit: str) -> None:
    if rate > TOLERANCE * limit:
        tolerance = f"{100 * (TOLERANCE - 1):.0f} %"
        accepted = f"at most {TOLERANCE * limit:.4g}, the data sheet's {limit:.4g} and {tolerance}"
        entry.fail(f"{rate:.4g} {unit}, which physics forbids", accepted=accepted)


Bounds = list[tuple[float, float, bool]]  # (seconds, least FLOPs or bytes in them, whether it is bytes) of a row
Cells = list[float]


def _gemm(cells: Cells, row: Entry) -> Bounds:
    """Of one product, forward or of each gradient."""
    m, n, k, *seconds = cells
    return [(s, 2 * m * n * k, False) for s in seconds]


def _attention(cells: Cells, row: Entry) -> Bounds:
    """Causal, of one sequence."""
    length, heads, head_dim, forward, backward = cells
    flops = 4 * heads * head_dim * visible_pairs(int(length))
    return [(forward, flops, False), (backward, 2 * flops, False)]


def _optimizer(cells: Cells, row: Entry) -> Bounds:
    elements, seconds = cells
    return [(seconds, elements * UPDATE_BYTES, True)]


def _newton_schulz(cells: Cells, row: Entry) -> Bounds:
    rows, columns, seconds = cells
    return [(seconds, matrix_flops(int(rows), int(columns)), False)]


def _layers(flops: Callable[[ModelSpec, int], float], of: str = "passes") -> Callable[[Cells, Entry], Bounds]:
    """Of a rank that has 1/tp of it; ``of``: rows are of forward and backward (passes), of B_INPUT and W, which are a
    backward together (split), or of a forward alone (token)."""

    def bounds(cells: Cells, row: Entry) -> Bounds:
        fingerprint, tp, rows, length, one_layer, two_layers = cells
        presets = _presets()
        if str(fingerprint) not in presets:
            accepted = f"rows of presets: {', '.join(preset_names())}"
            row.fail("of a model whose FLOPs nobody can check", accepted=accepted)
        layer_flops = flops(presets[str(fingerprint)], int(length)) * rows / tp
        if of == "split":
            return [(one_layer + two_layers, 2 * layer_flops, False)]
        backward = [(two_layers, 2 * layer_flops, False)] if of == "passes" else []
        return [(one_layer, layer_flops, False), *backward]

    return bounds


def _least(spec: ModelSpec, length: int) -> float:
    """Of a layer; of a mixture of experts without them, which depend on where tokens go."""
    return layer_flops(spec, length) if spec.moe is None else 2.0 * length * projection_elements(spec)


def _unbounded(cells: Cells, row: Entry) -> Bounds:
    _layers(_least)(cells, row)  # its model is known
    return []


ROWS: Mapping[str, Callable[[Cells, Entry], Bounds]] = {
    "gemm": _gemm, "gemm_backward": _gemm, "attention": _attention, "optimizer": _optimizer,
    "newton_schulz": _newton_schulz, "embed": _unbounded, "elementwise": _unbounded, "selective": _unbounded,
    "layers": _layers(_least), "split_layers": _layers(_least, "split"), "decode_layers": _layers(_least, "token"),
    "head": _layers(head_flops), "split_head": _layers(head_flops, "split"),
    "decode_head": _layers(head_flops, "token"),
}  # fmt: skip

@lru_cache(maxsize=1)
def _presets() -> Mapping[str, ModelSpec]:
    """By fingerprint."""
    specs = [load_model(name) for name in preset_names()]
    return {model_fingerprint(spec): spec for spec in specs}
