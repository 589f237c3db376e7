"""Megatron's context-parallel flags -> units of a stage.

``--cp-comm-type`` says how the ranks of a context-parallel group meet in attention:

* ``p2p``: every rank keeps all heads; keys and values go round (ring);
* ``allgather``: every rank keeps all heads; keys and values are gathered;
* ``a2a``: the ranks divide the heads (Ulysses);
* ``a2a+p2p``: groups of the first of ``--hierarchical-context-parallel-sizes`` divide the heads, and keys and
  values go round the groups.

Tokens are divided as evenly as they can be, in zigzag order; neither they nor the heads need be divisible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut
from hetero_megatron.plan.canonical import KeyValues, Unit
from hetero_megatron.plan.context import nested_zigzag

COMM_TYPES = ("p2p", "a2a", "a2a+p2p", "allgather")


@dataclass(frozen=True)
class ContextFlags:
    """``sizes``: (heads divided by, groups that exchange keys and values)."""

    sizes: tuple[int, int]
    gather: bool = False

    @property
    def size(self) -> int:
        return self.sizes[0] * self.sizes[1]


def context_flags(size: int, comm_type: Sequence[str] | str, hierarchical: Sequence[int] | None) -> ContextFlags:
    """Check the flags against each other.

    Raises:
        UserError: an unknown or mixed --cp-comm-type, or sizes that are missing, not asked for or not those of
            the whole.
    """

    def error(flag: str, value: object, problem: str, accepted: str) -> UserError:
        return UserError(problem, field="--" + flag, value=value, accepted=accepted, where="command line")

    types = (comm_type,) if isinstance(comm_type, str) else tuple(comm_type)
    for kind in types:
        if kind not in COMM_TYPES:
            raise error("cp-comm-type", kind, "unknown", ", ".join(COMM_TYPES))
    if len(set(types)) > 1:
        raise error("cp-comm-type", " ".join(types), "this version has one type for all layers", "one of them")
    kind, flag = types[0], "hierarchical-context-parallel-sizes"
    if kind != "a2a+p2p" or size == 1:
        if hierarchical is not None and size > 1:
            raise error(flag, list(hierarchical), f"--cp-comm-type {kind} has no hierarchy", "--cp-comm-type a2a+p2p")
        return ContextFlags({"a2a": (size, 1)}.get(kind, (1, size)), kind == "allgather")
    if hierarchical is None:
        raise error(flag, None, "--cp-comm-type a2a+p2p needs it", f"two sizes whose product is {size}")
    if len(hierarchical) != 2 or min(hierarchical) < 1 or hierarchical[0] * hierarchical[1] != size:
        accepted = f"two sizes whose product is {size} (--context-parallel-size)"
        raise error(flag, list(hierarchical), "not the sizes of the two levels", accepted)
    return ContextFlags((hierarchical[0], hierarchical[1]))


def context_members(
    flags: ContextFlags, ranks: Sequence[tuple[int, ...]], micro_batch_size: int, seq_length: int, num_heads: int
) -> tuple[tuple[Unit, ...], KeyValues | None]:
    """Units of one stage from its TP groups, in the order of their context rank."""
    members, groups = flags.sizes
    counts = [b - a for a, b in cut(seq_length, [1] * flags.size)]
    tokens = nested_zigzag([counts[g * members : (g + 1) * members] for g in range(groups)])
    heads = cut(num_heads, [1] * members)
    units = [
        Unit(tp, (1,) * len(tp), (0, micro_batch_size), tokens[i // members][i % members], heads[i % members],
             i // members)
        for i, tp in enumerate(ranks)
    ]  # fmt: skip
    return tuple(units), KeyValues("gather") if flags.gather and flags.size > 1 else None
