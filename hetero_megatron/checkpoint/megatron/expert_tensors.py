"""Experts in each of Megatron Core's forms -> one tensor of a layer, with the experts as first axis.

That is how ``torch_dist`` has them unless they were saved one by one: ``mlp.experts.experts.linear_fc1.weight``
[experts, 2 x ffn, hidden] and ``linear_fc2.weight`` [experts, hidden, ffn]. ``SequentialMLP`` has a module for each
expert, ``TEGroupedMLP`` numbered weights, ``GroupedMLP`` all experts' weights in one, transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from hetero_megatron.checkpoint.megatron.tensors import Part, damaged, same_values

STACKED = ".mlp.experts.experts."
# Of one expert: a rank's experts are numbered from 0 in the format torch, all from 0 in torch_dist.
_EACH = (
    re.compile(r"(?P<mlp>.*\.mlp)\.experts\.(local_)?experts\.(?P<expert>\d+)\.(?P<rest>linear_fc[12]\..+)"),
    re.compile(r"(?P<mlp>.*\.mlp)\.experts\.(?P<rest>linear_fc[12]\.(weight|bias))(?P<expert>\d+)"),
)
_TRANSPOSED = re.compile(r"(?P<mlp>.*\.mlp)\.experts\.weight(?P<which>[12])")


def stacked(stored_parts: Mapping[str, Sequence[Part]], experts: int, origin: object) -> dict[str, list[Part]]:
    """The tensors with those of experts in the one form; parts are by tensor-parallel rank.

    Args:
        experts: in ``stored_parts``, those of one expert-parallel rank in the format torch; needed for GroupedMLP's
            alone.

    Raises:
        UserError: an expert is missing, or experts differ in shape.
    """
    tensors: dict[str, list[Part]] = {}
    by_number: dict[str, dict[int, Sequence[Part]]] = {}
    for name, parts in stored_parts.items():
        one = next((match for form in _EACH if (match := form.fullmatch(name))), None)
        if one is not None:
            by_number.setdefault(f"{one['mlp']}.experts.experts.{one['rest']}", {})[int(one["expert"])] = parts
        elif (joint := _TRANSPOSED.fullmatch(name)) is not None:
            stacked_name = f"{joint['mlp']}.experts.experts.linear_fc{joint['which']}.weight"
            tensors[stacked_name] = [_turned(name, part, experts, joint["which"] == "1", origin) for part in parts]
        else:
            tensors[name] = list(parts)
    for name, numbered in by_number.items():
        if set(numbered) != set(range(len(numbered))):
            missing = next(i for i in range(len(numbered)) if i not in numbered)
            raise damaged(f"expert {missing} of {name} is missing", origin)
        ranks = zip(*(numbered[i] for i in sorted(numbered)))
        tensors[name] = [_along(name, experts_of, torch.stack, origin) for experts_of in ranks]
    return tensors


def joined(ranks: Sequence[Mapping[str, list[Part]]], origin: object) -> dict[str, list[Part]]:
    """The tensors of all expert-parallel ranks; what is no expert's is the same in all.

    Raises:
        UserError: ranks with different tensors, or with different values of what is no expert's.
    """
    if any(rank.keys() != ranks[0].keys() for rank in ranks):
        raise damaged("expert-parallel ranks hold different tensors", origin)
    tensors: dict[str, list[Part]] = {}
    for name, parts in ranks[0].items():
        if STACKED in name:
            parts_of_ranks = zip(*(rank[name] for rank in ranks), strict=True)
            tensors[name] = [_along(name, parts, torch.cat, origin) for parts in parts_of_ranks]
            continue
        if not all(same_values(parts, rank_tensors[name]) for rank_tensors in ranks[1:]):
            raise damaged(f"expert-parallel ranks have different values of {name}", origin)
        tensors[name] = parts
    return tensors


def _along(
    name: str, parts: Sequence[Part], put: Callable[[list[torch.Tensor]], torch.Tensor], origin: object
) -> Part:
    """Of several experts, or of several ranks' experts."""
    first = parts[0]
    ranks = put is torch.cat
    if any(part.dtype != first.dtype or part.shape[ranks:] != first.shape[ranks:] for part in parts):
        raise damaged(f"the experts of {name} differ in shape or dtype", origin)
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:]) if ranks else (len(parts), *first.shape)
    return Part(shape, first.dtype, lambda: put([part.read() for part in parts]))


def _turned(name: str, part: Part, experts: int, first: bool, origin: object) -> Part:
    """GroupedMLP's buffers: [hidden, experts x columns], which is to be seen as [experts, hidden, columns], and
    [experts x ffn, hidden] of ``linear_fc2``."""
    rows, columns = part.shape if len(part.shape) == 2 else (0, 0)
    if experts < 1 or not rows or (columns if first else rows) % experts:
        raise damaged(f"{name} is {list(part.shape)}, which is not of {experts} experts", origin)
    stacked_shape = (experts, rows, columns // experts) if first else (experts, rows // experts, columns)
    return Part((stacked_shape[0], stacked_shape[2], stacked_shape[1]), part.dtype, partial(_view, part, stacked_shape))


def _view(part: Part, shape: tuple[int, int, int]) -> torch.Tensor:
    return part.read().reshape(shape).transpose(1, 2)
