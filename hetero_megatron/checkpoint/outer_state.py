"""What outer steps leave in a checkpoint, and how a run goes on from it.

``model.<name>`` are the global weights, so whatever else reads a checkpoint gets these. What every island has for
itself is ``island.<number>.model.<name>``, ``island.<number>.optimizer.<moment>.<name>`` and, where differences are
compressed, ``island.<number>.lost.<name>``; of the outer optimizer there are ``outer.momentum.<name>``, and
``outer.sum.<name>`` of an exchange that was under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.manifest import METADATA, Damaged
from hetero_megatron.checkpoint.native import Checkpoint, damaged_error
from hetero_megatron.checkpoint.state import MODEL, OPTIMIZER, check_model, make_states, owned_tensors
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.outer_steps import Exchange, OuterSteps
from hetero_megatron.plans import Plan
from hetero_megatron.plans.canonical import Outer
from hetero_megatron.spec import ModelSpec, trained_tensors
from hetero_megatron.utils.text import plural, word

OUTER, LOST = "outer", "lost"  # OUTER: also key of the state
_PHASE = ("every", "fragments", "delay")  # by which it is told what is due when
_RATES = ("mixing", "lr", "momentum", "nesterov")


def outer_tensors(
    outer: OuterSteps, spec: ModelSpec, with_optimizer: bool, reading: bool = False
) -> tuple[dict[str, BoxedTensor], dict[str, float]]:
    """(boxes by name of everything this rank writes, or reads; the inner optimizer's numbers). What is the same on all
    islands is written by the first one. Called on all ranks: an exchange that is under way is waited for."""
    owned, numbers = owned_tensors(outer.optimizer, spec, with_optimizer)
    current_fragment = outer.under_way()
    sums = outer.settled(current_fragment) if current_fragment is not None else []
    shapes = {t.name: t.shape for t in trained_tensors(spec)}
    parts: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
    lost_boxes: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
    for fragment in outer.fragments:
        for i, piece in enumerate(fragment.pieces):
            values = {MODEL: piece.weights}
            if with_optimizer and piece.momentum is not None:
                values[f"{OUTER}.momentum"] = piece.momentum
            if with_optimizer and fragment is current_fragment:
                values[f"{OUTER}.sum"] = sums[i]
            if piece.lost is not None:
                lost_boxes[piece.name].append((piece.box, piece.lost))
            for kind, tensor in values.items() if reading or outer.index == 0 else ():
                parts[f"{kind}.{piece.name}"].append((piece.box, tensor))
    tensors = {key: BoxedTensor(shapes[_name(key)], boxes) for key, boxes in parts.items()}
    if with_optimizer:
        owned |= {f"{LOST}.{name}": BoxedTensor(shapes[name], boxes) for name, boxes in lost_boxes.items()}
        tensors |= {f"island.{outer.index}.{key}": tensor for key, tensor in owned.items()}
    return tensors, numbers


def _name(key: str) -> str:
    return key.split(".", 2 if key.startswith(f"{OUTER}.") else 1)[-1]


def outer_state(outer: OuterSteps) -> dict[str, Any]:
    """For the state."""
    options = outer.outer
    return {
        "islands": len(options.islands), "updates": outer.updates, "tokens": [f.tokens for f in outer.fragments],
        "under_way": outer.exchange is not None, "rates": {key: float(getattr(options, key)) for key in _RATES},
        "compress": options.compress, **{key: getattr(options, key) for key in _PHASE},
    }  # fmt: skip


def check_outer(checkpoint: Checkpoint, plan: Plan) -> None:
    """Refuse to go on with the optimizers of a checkpoint under other outer steps.

    Raises:
        UserError: it was made with other ones, or this run has none.
    """
    saved, outer = checkpoint.state.get(OUTER), plan.outer
    if saved is None:  # all islands begin from what it holds
        return
    islands = saved["islands"]
    accepted = "a plan with such outer steps, or --no-load-optim or --finetune, which take the global weights"
    if outer is None:
        raise UserError(
            f"the checkpoint is one of outer steps between {plural(islands, 'island')}, and the plan has none",
            field=checkpoint.field, value=str(checkpoint.path), accepted=accepted,
        )  # fmt: skip
    changes = [
        f"{key} {saved[key]} (here {getattr(outer, key)})" for key in _PHASE if saved[key] != getattr(outer, key)
    ]
    if islands != len(outer.islands):
        changes.insert(0, f"{islands} {word(islands, 'island')} (here {len(outer.islands)})")
    if (saved["rates"]["momentum"] > 0) != (outer.momentum > 0):
        changes.append(f"momentum {saved['rates']['momentum']:g} (here {outer.momentum:g})")
    if changes:
        raise UserError(
            f"the checkpoint was made with other outer steps: {', '.join(changes)}",
            field=checkpoint.field, value=str(checkpoint.path), accepted=accepted,
        )  # fmt: skip


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
    """Go on where the checkpoint's islands were, after :func:`check_outer`. Called on all ranks.

    Raises:
        UserError: it does not hold all of it.
    """
    check_model(checkpoint, spec)
    outer_saved = checkpoint.state[OUTER]
    outer.updates = outer_saved["updates"]
    for fragment, tokens in zip(outer.fragments, outer_saved["tokens"], strict=True):
        fragment.tokens = [float(count) for count in tokens]
    if outer_saved["under_way"]:
        outer.exchange = Exchange(None, [], [])
        current_fragment = outer.under_way()
        assert current_fragment is not None
        outer.exchange.sums = [torch.zeros_like(piece.weights) for piece in current_fragment.pieces]
    saved = checkpoint.state["optimizer"] or {}
    keys = (key for key in checkpoint.metadata.state_dict_metadata if key.startswith(f"island.0.{OPTIMIZER}."))
    names = (key.split(".") for key in keys)
    make_states(outer.optimizer, sorted({parts[3] for parts in names}), saved.get("numbers", {}))
    tensors, _ = outer_tensors(outer, spec, True, reading=True)
    if _compress(outer_saved) == Outer.compress:  # nothing was lost
        tensors = {key: t for key, t in tensors.items() if not key.startswith(f"island.{outer.index}.{LOST}.")}
    for key, tensor in tensors.items():
        if checkpoint.shape(key) != tensor.shape:
            damage = Damaged(checkpoint.path / METADATA, f"holds no complete state of outer steps: {key[:200]}")
            raise damaged_error(damage, checkpoint.field)
    checkpoint.read_into(tensors, group)
    outer.optimizer.all_gather()
