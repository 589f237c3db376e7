"""Memory of stages that are described without ranks: TP groups that divide everything evenly, on the rank with most."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from hetero_megatron.plans.buckets import BUCKET_BYTES, IN_FLIGHT, backward_order
from hetero_megatron.plans.memory.activations import RankWork, chunk_limit, kept_bytes, operand_bytes, working_bytes
from hetero_megatron.plans.memory.divided import buffer_bytes
from hetero_megatron.plans.memory.of_plan import ADAM_MOMENTS, saved_in_few_bits, state_bytes
from hetero_megatron.spec import LogicalTensor, ModelSpec, Share, shares, stage_tensors, tensor_box
from hetero_megatron.spec.adapted_model import evenly_adapted
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.utils.cached_method import cached_method

AVERAGED = 16  # layers over which buckets are averaged: those of small layers have several


class UniformStageMemory:
    """Of one model. A stage is given by the degree of its TP groups, its number of layers, which are average ones where
    their kinds differ, and whether it has the embedding and the head.

    Args:
        item: bytes of a weight; moments: optimizer moments per element.
        logits_bytes: of a micro-batch's logits on a rank, above which head and loss go through chunks of tokens.
        muon: matrices have one moment, and with TP masters that are copies in any dtype.
    """

    def __init__(
        self, spec: ModelSpec, item: int, moments: int = ADAM_MOMENTS, logits_bytes: int = LOGITS_BYTES,
        muon: bool = False,
    ) -> None:  # fmt: skip
        self.spec, self.item, self.moments, self.logits_bytes, self.muon = spec, item, moments, logits_bytes, muon
        self._even = evenly_adapted(spec) if spec.lora is not None else spec  # of which buckets are

    @cached_method
    def held(self, tp: int, layers: int, embed: bool, head: bool) -> int:
        """Parameters."""
        return self._most(tp, layers, embed, head, False)

    @cached_method
    def trained(self, tp: int, layers: int, embed: bool, head: bool) -> int:
        """Those that have gradients and optimizer states: all, or with adapters only these."""
        return self._most(tp, layers, embed, head, True)

    def _most(self, tp: int, layers: int, embed: bool, head: bool, trained: bool) -> int:
        spec, ends = self.spec, (embed, head, trained)
        return max(
            round(layers * _layer_elements(spec, share, trained)) + _elements(spec, share, *ends)
            for share in _equal_shares(spec, tp)
        )

    @cached_method
    def saved_per_layer(self, tp: int) -> float:
        """Bytes that the weights of a layer take less because some are in few bits, on the rank where that is least."""
        def saved(share: Share) -> float:
            return _mean_over_layers(self.spec, lambda tensors: saved_in_few_bits(tensors, share, self.item))

        return min(map(saved, _equal_shares(self.spec, tp)))

    def states(self, tp: int, layers: int, embed: bool, head: bool, owned: float) -> tuple[int, int, int]:
        """Bytes of (weights, gradients, optimizer); ``owned``: elements whose optimizer states the rank keeps."""
        cut, saved = (tp, layers, embed, head), int(layers * self.saved_per_layer(tp))
        held_elements, trained = self.held(*cut), self.trained(*cut)
        states = state_bytes(held_elements, owned, self.item, self.moments, trained, saved)
        if not self.muon or not trained:  # an embedding alone, beside adapters, trains nothing
            return states
        matrices = owned * layers * self._matrices_per_layer(tp) / trained
        copies = self.item if tp > 1 and self.item != 2 else 0
        return *states[:2], states[2] - round(matrices * ((self.moments - 1) * max(self.item, 4) - copies))

    @cached_method
    def _matrices_per_layer(self, tp: int) -> float:
        """Elements of Muon's matrices of an average layer, on the rank with most of a layer."""
        from hetero_megatron.plans.matrices import is_matrix

        def elements(share: Share, every: bool) -> float:
            return _mean_over_layers(
                self.spec, lambda tensors: _size((t for t in tensors if every or is_matrix(t)), share, True)
            )

        return elements(max(_equal_shares(self.spec, tp), key=lambda share: elements(share, True)), False)

    @property
    def whole(self) -> tuple[int, int, int]:
        """The same of all ranks together, if each held what it owns."""
        cut = 1, self.spec.num_layers, True, True
        return self.states(*cut, self.trained(*cut))

    @cached_method
    def mean_bucket(self, tp: int) -> float:
        """Elements of a bucket of decoder layers on average; whole tensors do not fill all of them."""
        spec, layers = self._even, min(self.spec.num_layers, AVERAGED)
        rows = [_bucket_sizes(spec, False, False, share, layers) for share in _equal_shares(spec, tp)]
        return max(sum(row) / len(row) for row in rows)

    @cached_method
    def bucket_rows(self, tp: int, layers: int, embed: bool, head: bool) -> tuple[tuple[int, int, bool], ...]:
        """The buckets of so many layers, embedding and head that the same ranks hold, in the order of backward:
        (elements, decoder layers that are in it or before it, whether it has the embedding)."""
        tp_shares, bucket_elements, is_wide = _equal_shares(self.spec, tp), BUCKET_BYTES // 4, False
        rows: list[tuple[int, int, bool]] = []
        layers_done: set[int] = set()
        for segment in backward_order(t for t in stage_tensors(self._even, range(layers), embed, head) if t.trained):
            for tensor in segment:
                size, last = max(tensor_box(tensor, share).size for share in tp_shares), tensor.layer == "embed"
                layers_done |= {tensor.layer} if isinstance(tensor.layer, int) else set()
                joined = rows and tensor.wide == is_wide and rows[-1][0] + size <= bucket_elements
                previous = rows.pop() if joined else (0, 0, False)
                rows.append((previous[0] + size, len(layers_done), previous[2] or last))
                is_wide = tensor.wide
        return tuple(rows)

    @cached_method
    def last_bucket(self, tp: int) -> int:
        """Elements of the last bucket of decoder layers in backward."""
        return max(_bucket_sizes(self._even, False, False, share)[-1] for share in _equal_shares(self.spec, tp))

    @cached_method
    def buckets(self, tp: int, embed: bool, head: bool) -> tuple[int, int]:
        """Elements of (those buckets that are under way at once, the largest one) on a rank with decoder layers."""
        # More layers fill buckets that are not full here.
        rows = [_bucket_sizes(self._even, embed, head, share) for share in _equal_shares(self.spec, tp)]
        rows = [[max(size, BUCKET_BYTES // 4) for size in row] for row in rows]
        return max(sum(row[i : i + IN_FLIGHT]) for row in rows for i in range(len(row))), max(map(max, rows))

    def buffers(self, tp: int, embed: bool, head: bool, copies: float, trained: Any) -> Any:
        """Bytes of buckets under way.

        Args:
            copies: TP groups that hold the same layers.
            trained: elements on the rank, or an array for several ranks.
        """
        if copies <= 1 and tp == 1:
            return 0 * trained
        # Without TP all of them hold the same elements.
        moving, adding = buffer_bytes(1.0, 1 / copies, copies, self.item, tp == 1 and not self.muon)
        if self.muon and tp > 1:  # nearly all that is held is given, and as much is taken
            moving, adding = max(self.item, 4) * 2.0, max(self.item, 4) * (1 + 1 / copies)
        in_flight, largest = self.buckets(tp, embed, head)
        return np.maximum(moving * np.minimum(trained, in_flight), adding * np.minimum(trained, largest))

    @cached_method
    def activations(
        self, tp: int, layers: int, embed: bool, head: bool, recompute: str, first: int, rows: int, length: int,
        fp8: str | None = None, away: int = 0,
    ) -> tuple[int, int]:  # fmt: skip
        """(bytes kept per micro-batch on the device, working bytes of backward).

        Args:
            recompute, first, fp8: as in :class:`RankWork`; rows: sequences of ``length`` tokens on a TP group.
            away: so many first layers have theirs in host memory.
        """
        work = self._work(tp, layers, embed, head, recompute, first, rows, length, fp8, away)
        return kept_bytes(self.spec, work), working_bytes(self.spec, work)

    @cached_method
    def most_beside(
        self, tp: int, layers: int, embed: bool, head: bool, recompute: str, first: int, rows: int, length: int,
        fp8: str | None = None, away: int = 0,
    ) -> int:  # fmt: skip
        """Bytes that any backward works with; arguments as of :meth:`activations`."""
        from hetero_megatron.plans.memory.split_backward import most_beside

        work = self._work(tp, layers, embed, head, recompute, first, rows, length, fp8, away)
        return most_beside(self.spec, work)

    @cached_method
    def host_layers(
        self, tp: int, layers: int, embed: bool, head: bool, recompute: str, first: int, rows: int, length: int,
        fp8: str | None = None, away: int = 0,
    ) -> tuple[float, ...]:  # fmt: skip
        """By layer, bytes of a micro-batch in host memory; arguments as of :meth:`activations`."""
        from hetero_megatron.plans.memory.offloaded import layer_bytes

        work = self._work(tp, layers, embed, head, recompute, first, rows, length, fp8, away)
        return tuple(layer.host for layer in layer_bytes(self.spec, work))

    @cached_method
    def operands(self, tp: int, layers: int, head: bool, rows: int, length: int) -> int:
        """Bytes of a micro-batch from B_INPUT to W, where backward is split."""
        return operand_bytes(self.spec, self._work(tp, layers, False, head, "none", 0, rows, length))

    def _work(
        self, tp: int, layers: int, embed: bool, head: bool, recompute: str, first: int, rows: int, length: int,
        fp8: str | None = None, away: int = 0,
    ) -> RankWork:  # fmt: skip
        tokens = rows * length
        limit = chunk_limit(self.spec, [(tokens, (1,) * tp)], self.item, self.logits_bytes) if head else None
        return RankWork(
            layers, embed, head, recompute, first, tokens, self.item, tp, tp, limit, fp8=fp8, rows=rows, offloaded=away
        )


@lru_cache(maxsize=4096)
def _layer_elements(spec: ModelSpec, share: Share, trained: bool) -> float:
    """Of an average layer."""
    return _mean_over_layers(spec, lambda tensors: _size(tensors, share, trained))


def _mean_over_layers(spec: ModelSpec, size: Callable[[Iterable[LogicalTensor]], int]) -> float:
    """Of the tensors of an average layer; dense MLPs and mixtures of experts have unlike ones, so have attention and
    linear attention, and layers may have adapters of their own."""
    sites = spec.lora.sites if spec.lora is not None else ()
    kinds: dict[object, list[int]] = {}
    for layer, kind in enumerate(spec.layers):
        kinds.setdefault((kind.mlp, kind.mixer, *(layer in site.layers for site in sites)), []).append(layer)
    sizes = [len(equal) * size(stage_tensors(spec, equal[:1], False, False)) for equal in kinds.values()]
    return sum(sizes) / spec.num_layers


@lru_cache(maxsize=4096)
def _elements(spec: ModelSpec, share: Share, embed: bool, head: bool, trained: bool) -> int:
    return _size(stage_tensors(spec, (), embed, head), share, trained)


def _size(tensors: Iterable[LogicalTensor], share: Share, trained: bool) -> int:
    return sum(tensor_box(t, share).size for t in tensors if t.trained or not trained)


@lru_cache(maxsize=1024)
def _equal_shares(spec: ModelSpec, tp: int) -> tuple[Share, ...]:
    """The distinct shares of an equal split over ``tp`` ranks."""
    return tuple(dict.fromkeys(shares(spec, (1,) * tp)))


@lru_cache(maxsize=4096)
def _bucket_sizes(spec: ModelSpec, embed: bool, head: bool, share: Share, layers: int = IN_FLIGHT) -> list[int]:
    """Elements of the buckets of a rank with so many decoder layers, in the order of backward."""
    sizes: list[int] = []
    for segment in backward_order(t for t in stage_tensors(spec, range(layers), embed, head) if t.trained):
        for size in (tensor_box(tensor, share).size for tensor in segment):
            if sizes and 4 * (sizes[-1] + size) <= BUCKET_BYTES:
                sizes[-1] += size
            else:
                sizes.append(size)
    return sizes
