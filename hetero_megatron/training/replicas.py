"""Weights that several ranks hold are the same bits on all of them: compared by hashes, every so many steps."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from hetero_megatron.checkpoint.finite import listed
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, Layout, refine
from hetero_megatron.plan.buckets import tensor_holders
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.utils.text import rank_ranges

FLAG = "--check-weight-hash-across-dp-replicas-interval"
_WORD = 16  # hex digits of a hash that are compared
Part = tuple[str, Box, tuple[int, ...]]  # tensor, some of it, the ranks that hold just this


class ReplicaCheck:
    """Built on every rank of the plan.

    Args:
        interval: steps between checks; None: never.
    """

    def __init__(self, runtime: Runtime, interval: int | None) -> None:
        self.runtime, self.interval = runtime, interval
        self._parts: list[Part] | None = None

    def after_step(self, step: int) -> None:
        """Called on all ranks.

        Raises:
            UserError: copies differ (on all ranks); it names the ranks that differ from most others, and tensors.
        """
        if self.interval is None or step % self.interval:
            return
        self.runtime.comm.activity = "comparing copies of weights"
        if self._parts is None:
            self._parts = list(self._held_by_several())
        mine = {f"{name}@{box.lo}": self._hash(name, box) for name, box, _ in self._parts}
        # What the same ranks hold is compared as a whole, and only told apart where it differs.
        whole: dict[str, str] = {}
        for name, box, holders in self._parts:
            key = ",".join(map(str, holders))
            whole[key] = _digest((whole.get(key, "") + mine[f"{name}@{box.lo}"]).encode())
        world = self.runtime.world
        if not differing(world.ranks, world.gather_objects(whole, dict[str, str])):
            return
        found = differing(world.ranks, world.gather_objects(mine, dict[str, str]))
        raise refusal(found, step, self.interval)

    def _held_by_several(self) -> Iterator[Part]:
        rank = self.runtime.comm.rank
        params, layouts = self._params(), tensor_holders(self.runtime.plan, self.runtime.spec)
        known: dict[int, list[tuple[Box, tuple[int, ...]]]] = {}  # layers share layouts
        for name in sorted(params.keys() & layouts.keys()):
            layout = layouts[name]
            if id(layout) not in known:
                known[id(layout)] = list(_shared(layout, rank))
            yield from ((name, box, holders) for box, holders in known[id(layout)])

    def _params(self) -> Mapping[str, torch.Tensor]:
        boxes = self.runtime.boxes
        sync = self.runtime.sync
        params = {**dict(self.runtime.model.named_parameters()), **sync.params}
        for name in sync.divided_names:
            del params[name]  # nobody has a copy: it is gathered from one owner whenever it is used
        return {n: p for n, p in params.items() if n in boxes and tuple(p.shape) == tuple(boxes[n].shape)}

    def _hash(self, name: str, box: Box) -> str:
        held = self.runtime.boxes[name]
        inside = tuple(slice(lo - at, hi - at) for lo, hi, at in zip(box.lo, box.hi, held.lo, strict=True))
        values = self._params()[name].detach()[inside].contiguous().cpu()
        return _digest(memoryview(values.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _shared(layout: Layout, rank: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    for cell in refine(layout):
        if len(cell.holders) > 1 and rank in cell.holders:
            yield cell.box, cell.holders


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:_WORD]


def differing(ranks: Sequence[int], everyone: Sequence[Mapping[str, str]]) -> dict[str, tuple[list[int], list[int]]]:
    """By what differs: the ranks that are wrong, and those they differ from; where no value is held by most, all that
    hold it, and nobody."""
    found = {}
    for key in dict.fromkeys(key for theirs in everyone for key in theirs):
        held = {rank: theirs[key] for rank, theirs in zip(ranks, everyone, strict=True) if key in theirs}
        (value, most), *rest = Counter(held.values()).most_common()
        if rest:
            right = [r for r, v in held.items() if v == value] if most > rest[0][1] else []
            found[key] = ([r for r in held if r not in right], right)
    return found


def refusal(found: Mapping[str, tuple[list[int], list[int]]], step: int, interval: int) -> UserError:
    """``found``: by :func:`differing`, of tensors and where in them."""
    wrong, right = next(iter(found.values()), ([], []))
    wrong = sorted({rank for ranks, others in found.values() if bool(others) == bool(right) for rank in ranks})
    names = listed(key.partition("@")[0] for key in found)
    if right:
        who = f"on {'rank' if len(wrong) == 1 else 'ranks'} {rank_ranges(wrong)}, unlike on most that hold them"
    else:
        who = f"between ranks {rank_ranges(wrong)}"
    return UserError(
        f"copies of weights differ after step {step} {who}: {names}", field=FLAG, value=interval,
        accepted="equal bits on every rank that holds them: other hardware or kernels for the rank that differs, then "
        "--load of a checkpoint before",
    )  # fmt: skip
