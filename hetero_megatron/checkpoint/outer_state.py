"""What outer steps leave in a checkpoint, and how a run goes on from it.

``model.<name>`` are the global weights, so whatever else reads a checkpoint gets these. What every island has for
itself is ``island.<number>.model.<name>``, ``island.<number>.optimizer.<moment>.<name>`` and, where differences are
compressed, ``island.<number>.lost.<name>``; of the outer optimizer there are ``outer.momentum.<name>``, and
``outer.sum.<name>`` of an exchange that was under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.manifest import METADATA, Damaged
from hetero_megatron.checkpoint.native import Checkpoint, damaged_error
from hetero_megatron.checkpoint.state import (
    ISLAND,
    LOST,
    MODEL,
    OPTIMIZER,
    check_model,
    logical_name,
    make_states,
    owned_tensors,
)
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.optimizer import ShardedOptimizer
from hetero_megatron.parallel.outer_steps import OuterMoment, OuterSteps
from hetero_megatron.plans import Plan
from hetero_megatron.plans.canonical import Outer
from hetero_megatron.plans.outer import PHASE, other_phase
from hetero_megatron.spec import ModelSpec, trained_tensors
from hetero_megatron.utils.text import plural

OUTER = "outer"  # also key of the state
_RATES = ("mixing", "lr", "momentum", "nesterov")


def outer_tensors(
    outer: OuterSteps, spec: ModelSpec, with_optimizer: bool, reading: bool = False
) -> tuple[dict[str, BoxedTensor], dict[str, float]]:
    """(boxes by name of everything this rank writes, or holds and reads; the inner optimizer's numbers). What is the
    same on all islands is written by the first one."""
    owned, numbers = owned_tensors(outer.optimizer, spec, with_optimizer)
    sums = outer.exchange.sums if outer.exchange is not None else None
    shapes = {t.name: t.shape for t in trained_tensors(spec)}
    parts: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
    lost_boxes: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
    for fragment in outer.fragments:
        for i, piece in enumerate(fragment.pieces):
            values = {MODEL: piece.weights}
            if with_optimizer and piece.momentum is not None:
                values[f"{OUTER}.momentum"] = piece.momentum
            if with_optimizer and sums is not None and fragment is outer.current:
                values[f"{OUTER}.sum"] = sums[i]
            if piece.lost is not None:
                lost_boxes[piece.name].append((piece.box, piece.lost))
            for kind, tensor in values.items() if reading or outer.index == 0 else ():
                parts[f"{kind}.{piece.name}"].append((piece.box, tensor))
    tensors = {key: BoxedTensor(shapes[logical_name(key)], boxes) for key, boxes in parts.items()}
    if with_optimizer:
        owned |= {f"{LOST}.{name}": BoxedTensor(shapes[name], boxes) for name, boxes in lost_boxes.items()}
        tensors |= {f"{ISLAND}.{outer.index}.{key}": tensor for key, tensor in owned.items()}
    return tensors, numbers


def outer_state(outer: OuterSteps) -> dict[str, Any]:
    """For the state."""
    options, moment = outer.outer, outer.moment()
    return {
        "islands": len(options.islands), "updates": moment.updates, "tokens": moment.tokens,
        "under_way": moment.under_way, "rates": {key: float(getattr(options, key)) for key in _RATES},
        "compress": options.compress, **{key: getattr(options, key) for key in PHASE},
    }  # fmt: skip


def check_outer(checkpoint: Checkpoint, plan: Plan) -> None:
    """Refuse to go on with the optimizers of a checkpoint where exchanges are due at other steps.

    Raises:
        UserError: it was made with other ones.
    """
    saved, outer = checkpoint.state.get(OUTER), plan.outer
    if saved is None or outer is None:  # all islands begin from what it holds; a plan of one takes the global weights
        return
    if changes := other_phase({**saved["rates"], **saved}, outer):
        accepted = "a plan with such outer steps, or --no-load-optim or --finetune, which take the global weights"
        raise UserError(
            f"the checkpoint was made with other outer steps: {', '.join(changes)}",
            field=checkpoint.field, value=str(checkpoint.path), accepted=accepted,
        )  # fmt: skip


def other_islands(was: Mapping[str, Any], outer: Outer | None) -> list[str]:
    """What a run says that goes on with another number of islands than the checkpoint's."""
    before, now = was["islands"], 1 if outer is None else len(outer.islands)
    origin = f"the checkpoint is one of outer steps between {plural(before, 'island')}, "
    if outer is None:
        return [f"{origin}and the plan has none: it goes on from the global weights, with the first island's moments"]
    if now > before:
        return [f"{origin}here are {now}: the others begin from the global weights, with the first one's moments"]
    return [f"{origin}here are {now}: what the others went since the last exchange is left out"] if now < before else []


def other_rates(was: Mapping[str, Any], outer: Outer) -> list[str]:
    """What may differ from the checkpoint's, and changes numbers."""
    rates = {key: float(getattr(outer, key)) for key in _RATES}
    notices = [
        f"outer {key} is {rates[key]:g}; the checkpoint was made with {rate:g}"
        for key, rate in was["rates"].items() if rates.get(key, rate) != rate
    ]  # fmt: skip
    compress = _compress(was)
    if compress != outer.compress:
        dropped = "" if outer.compressed else ", and what that lost so far of differences is left out"
        notices.append(f"outer compress is {outer.compress}; the checkpoint was made with {compress}{dropped}")
    return notices


def _compress(was: Mapping[str, Any]) -> str:
    return str(was.get("compress", Outer.compress))  # older ones have none


def load_outer(checkpoint: Checkpoint, outer: OuterSteps, spec: ModelSpec, group: Group) -> None:
    """Go on where the checkpoint's islands were, after :func:`check_outer`; further ones begin from the global weights.
    Called on all ranks.

    Raises:
        UserError: it does not hold all of it.
    """
    check_model(checkpoint, spec)
    saved = checkpoint.state[OUTER]
    islands = [i if i < saved["islands"] else None for i in range(len(outer.places))]
    tokens = [[float(count) for count in row] for row in saved["tokens"]]
    outer.begin_at(OuterMoment(saved["updates"], tokens, False, saved["under_way"]), islands)
    _make_states(checkpoint, outer.optimizer)
    tensors, _ = outer_tensors(outer, spec, True, reading=True)
    has_lost = _compress(saved) != Outer.compress
    sources = {key: source_of(key, islands, f"{ISLAND}.0.", has_lost) for key in tensors}
    _read(checkpoint, {source: tensors[key] for key, source in sources.items() if source is not None}, group)
    if islands[outer.index] is None:
        outer.begin_from_global()
    outer.optimizer.all_gather()


def source_of(key: str, islands: Sequence[int | None], first: str, has_lost: bool) -> str | None:
    """Which tensor of a saved state one of the new state comes from; None: from none, as it begins with zeros or, own
    weights of an island, with the global ones.

    Args:
        islands: by island, which of the saved ones it goes on with; None: it begins from the global weights.
        first: prefix of the moments that such a one begins with.
        has_lost: whether there is what compression lost.
    """
    if not key.startswith(f"{ISLAND}."):
        return key
    _, number, name = key.split(".", 2)
    kind, origin = name.split(".", 1)[0], islands[int(number)]
    if kind == LOST and not has_lost or kind != OPTIMIZER and origin is None:
        return None
    return f"{first}{name}" if origin is None else f"{ISLAND}.{origin}.{name}"


def load_one_island(checkpoint: Checkpoint, optimizer: ShardedOptimizer, spec: ModelSpec, group: Group) -> None:
    """Go on without outer steps: from the global weights, with the first island's moments. Called on all ranks.

    Raises:
        UserError: it does not hold all of it.
    """
    check_model(checkpoint, spec)
    _make_states(checkpoint, optimizer)
    tensors, _ = owned_tensors(optimizer, spec)
    _read(checkpoint, {
        f"{ISLAND}.0.{key}" if key.startswith(f"{OPTIMIZER}.") else key: tensor for key, tensor in tensors.items()
    }, group)  # fmt: skip
    optimizer.all_gather()


def _make_states(checkpoint: Checkpoint, optimizer: ShardedOptimizer) -> None:
    """Moments as the checkpoint has them, to be overwritten."""
    keys = (key for key in checkpoint.metadata.state_dict_metadata if key.startswith(f"{ISLAND}.0.{OPTIMIZER}."))
    numbers = (checkpoint.state["optimizer"] or {}).get("numbers", {})
    make_states(optimizer, sorted({key.split(".")[3] for key in keys}), numbers)


def _read(checkpoint: Checkpoint, tensors: Mapping[str, BoxedTensor], group: Group) -> None:
    for key, tensor in tensors.items():
        if checkpoint.shape(key) != tensor.shape:
            damage = Damaged(checkpoint.path / METADATA, f"holds no complete state of outer steps: {key[:200]}")
            raise damaged_error(damage, checkpoint.field)
    checkpoint.read_into(tensors, group)
