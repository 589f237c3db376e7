"""The matrices that Muon updates, and which rank owns each of them whole. No torch.

Muon's update needs all of a matrix, so its owner gets the whole logical matrix, also where tensor parallelism cuts it:
the layout of the owners has it as one box, and the exchange between holders and owners is that of any other bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, Layout
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors

if TYPE_CHECKING:
    from hetero_megatron.plans.canonical import Plan

MUON = "muon"  # value of --optimizer
STEPS = 5  # of Newton-Schulz, in predictions: whatever --muon-num-ns-steps says
MOMENTUM = "momentum_buffer"  # what is kept of a matrix, beside its master
LEAST_SHARE = 1e-9  # a share of zero: what only such ranks hold must still find an owner among them


def is_matrix(tensor: LogicalTensor) -> bool:
    """Whether Muon updates a trained tensor: weights of projections, of routers, and of every expert. Embeddings, head,
    norms, biases, the filters of convolutions and what else is a vector have AdamW."""
    axes = len(tensor.shape) - tensor.per_expert
    in_layer = isinstance(tensor.layer, int) or tensor.name.startswith("model.layers.")  # of a module that predicts
    return in_layer and axes == 2 and not tensor.is_bias and not tensor.by_load and tensor.axes[-1].role != "taps"


def matrix_boxes(tensor: LogicalTensor) -> list[Box]:
    """Where the matrices of a tensor lie in it: it is one, or one per expert."""
    whole = Box.whole(tensor.shape)
    return [whole.rows(i, i + 1) for i in range(tensor.shape[0])] if tensor.per_expert else [whole]


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Of one step: two products with the smaller side's Gram matrix, and its square."""
    smaller, larger = sorted((rows, columns))
    return 4 * smaller * smaller * larger + 2 * smaller**3


def matrix_flops(rows: int, columns: int) -> int:
    """Of one update of a matrix."""
    return STEPS * newton_schulz_flops(rows, columns)


def update_rate(measured: Iterable[tuple[float, ...]]) -> float:
    """FLOP/s of updates that were measured, each (rows, columns, seconds)."""
    rows = [(matrix_flops(int(a), int(b)), seconds) for a, b, seconds in measured]
    return sum(flops for flops, _ in rows) / sum(seconds for _, seconds in rows)


@lru_cache(maxsize=8)
def mean_flops(spec: ModelSpec) -> float:
    """Of an update per trained element, over the whole model."""
    trained = [t for t in logical_tensors(spec) if t.trained]
    flops = (matrix_flops(*t.shape[-2:]) * len(matrix_boxes(t)) for t in trained if is_matrix(t))
    return sum(flops) / sum(t.size for t in trained)


def update_flops(owners: Iterable[tuple[LogicalTensor, Layout]]) -> dict[int, float]:
    """By rank, of one update of the matrices of these tensors that it owns."""
    flops: dict[int, float] = defaultdict(float)
    for tensor, layout in owners:
        rows, columns = tensor.shape[-2:]
        per_element = matrix_flops(rows, columns) / (rows * columns)
        for rank, boxes in layout.boxes.items():
            flops[rank] += per_element * sum(box.size for box in boxes)
    return flops


def in_order(segments: Iterable[Sequence[LogicalTensor]]) -> list[list[LogicalTensor]]:
    """Segments of tensors in backward order, with the norms and biases of layers behind all of them: between matrices
    they would cut buckets short."""
    matrix_segments, last = list[list[LogicalTensor]](), list[LogicalTensor]()
    for segment in segments:
        late = [t for t in segment if isinstance(t.layer, int) and not is_matrix(t)]
        matrix_segments.append([t for t in segment if t not in late])
        last += late
    return [*matrix_segments, last]


def matrix_owners(
    tensors: Iterable[LogicalTensor], holders: Mapping[str, Layout], weights: Mapping[int, float]
) -> dict[str, Layout]:
    """One owner for each matrix among the ranks that hold some of it.

    The longest update comes first, and goes to the rank that would be done with all of its own first (LPT on machines
    of unlike speed). Deterministic, so all ranks agree without talking.

    Args:
        weights: by rank, how fast it updates, relative to the others.
    """
    jobs = []
    for place, tensor in enumerate(t for t in tensors if is_matrix(t)):
        flops = newton_schulz_flops(*tensor.shape[-2:])
        jobs += [(-flops, place, box, tensor.name) for box in matrix_boxes(tensor)]
    load: dict[int, float] = {}
    owned: dict[str, dict[int, list[Box]]] = {}
    candidates: dict[tuple[int, Box], list[int]] = {}
    for negative_cost, _, box, name in sorted(jobs):
        layout = holders[name]
        ranks = candidates.get((id(layout), box))
        if ranks is None:
            ranks = candidates[id(layout), box] = _holding(layout, box)
        ends = [((load.get(r, 0.0) - negative_cost) / max(weights.get(r, 1.0), LEAST_SHARE), r) for r in ranks]
        rank = min(ends)[1]
        load[rank] = load.get(rank, 0.0) - negative_cost
        owned.setdefault(name, {r: [] for r in layout.ranks})[rank].append(box)
    return {
        name: Layout(holders[name].shape, {r: tuple(boxes) for r, boxes in by_rank.items()})
        for name, by_rank in owned.items()
    }


def _holding(layout: Layout, box: Box) -> list[int]:
    holds_boxes: dict[tuple[Box, ...], bool] = {}
    for boxes in layout.boxes.values():
        if boxes not in holds_boxes:
            holds_boxes[boxes] = any(box.intersect(b) for b in boxes)
    return [rank for rank, boxes in layout.boxes.items() if holds_boxes[boxes]]


def muon_states(tensor: LogicalTensor, kinds: Collection[str]) -> list[str]:
    """Those of Muon's ``kinds`` of states that a tensor has: a matrix its momentum, all others Adam's moments."""
    return [kind for kind in kinds if (kind == MOMENTUM) == is_matrix(tensor)]


def check_muon(plan: Plan, spec: ModelSpec) -> None:
    """Refuse what Muon cannot be combined with.

    Raises:
        UserError: adapters; outer steps; a stage that divides its weights or whose optimizer is in host memory.
    """

    def refuse(problem: str, accepted: str) -> UserError:
        return UserError(problem, field="--optimizer", value=MUON, accepted=accepted)

    if spec.lora is not None:
        raise refuse(
            "Muon updates whole weight matrices, and adapters (--lora-rank) are factors of small ones",
            "--optimizer adam",
        )
    if plan.outer is not None:
        raise refuse("the plan has outer steps between islands (outer)", "--optimizer adam, or a plan without outer")
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            stage_name = f"pipelines[{p}].stages[{s}]"
            if stage.weights is not None:
                raise refuse(
                    f"{stage_name} divides its weights among its replicas (weights), and a matrix has one owner",
                    f"--optimizer adam, or a plan without weights in {stage_name}",
                )
            if stage.optimizer.offload:
                raise refuse(
                    f"{stage_name}.optimizer.offload: only Adam runs in host memory",
                    "--optimizer adam, or offload: false",
                )
