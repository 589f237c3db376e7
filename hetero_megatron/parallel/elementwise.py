"""Recompute of elementwise results: outputs of norms and activations are not kept for the products that read them.

What makes them keeps its own inputs, and from these they are made again when backward of a product asks. Under tensor
parallelism a product reads the tokens of all ranks, which are then gathered again: in the same order on all of them, as
they go through the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hetero_megatron.model.gpt import MLP, Layer
from hetero_megatron.model.latent_attention import LatentAttention
from hetero_megatron.model.layers import Norm
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.parallel.tensor import GatheredInput

Tensor = torch.Tensor


# Of a tensor, what is kept of it until backward: the tensor, or something whose ``take()`` gives it again.
Keep = Callable[[Tensor], Any]


def apply_elementwise(layer: Layer, keep: Keep) -> None:
    """Have backward of ``layer`` make the outputs of its norms and activations again, where products read them;
    ``keep``: of all else."""
    results = Results(keep)
    for norm in _norms(layer):
        norm.forward = partial(results.norm, norm.forward)  # type: ignore[method-assign]
    mlp, blocks = layer.mlp, [layer.mixer, layer.mlp]
    if isinstance(mlp, MoEMLP):
        mlp.experts.activate = partial(results.of, mlp.experts.activate)
        blocks.append(mlp.shared_expert)
    for block in blocks:
        if isinstance(block, MLP) or (block is layer.mixer and layer.kind.linear):
            owner = cast(Any, block)
            owner.activate = partial(results.of, owner.activate)
        gathered = getattr(block, "gathered", None)
        if isinstance(gathered, GatheredInput):
            gathered.run = partial(results.of, gathered.run)
    layer.forward = partial(results.during, layer.forward)  # type: ignore[method-assign]


def _norms(layer: Layer) -> Iterable[Norm]:
    """Those whose outputs are inputs of products. Queries and keys are not: attention keeps them turned."""
    before_attention, _, before_mlp, _ = layer.norms()
    attention = layer.mixer
    latents = (getattr(attention, name, None) for name in ("q_a_layernorm", "kv_a_layernorm"))
    norms = (before_attention, before_mlp, *(latents if isinstance(attention, LatentAttention) else ()))
    return (norm for norm in norms if norm is not None)


class _Result:
    """A tensor that is made again in backward: ``run`` of what is kept anyway, or of another such tensor."""

    def __init__(self, run: Callable[..., Tensor], args: tuple[Any, ...], version: int) -> None:
        self._run, self._args, self.version = run, args, version
        self.readers, self._again = 0, list[Tensor]()

    def take(self) -> Tensor:
        """For one of its readers; it is there from the first of them to the last."""
        output = self._value()
        self.readers -= 1
        self._again = [output] if self.readers > 0 else []
        return output

    def _value(self) -> Tensor:
        if self._again:
            return self._again[0]
        with torch.no_grad():
            return self._run(*(arg._value() if isinstance(arg, _Result) else _take(arg) for arg in self._args))


class Results:
    """The elementwise results of one layer, of which no operator keeps a copy while the layer runs.

    They are told by their memory, which a weak reference keeps from being another's before the layer has ended.
    """

    def __init__(self, keep: Keep = Tensor.detach) -> None:
        self._keep_else = keep
        self._results: dict[int, tuple[StorageWeakRef, _Result]] = {}

    def during(self, forward: Callable[..., Any], *args: Any) -> Any:
        """``forward(*args)`` of the layer."""
        if not torch.is_grad_enabled():
            return forward(*args)
        try:
            with saved_tensors_hooks(self._keep, _take):
                return forward(*args)
        finally:
            self._results.clear()

    def of(self, run: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """``run(*args)``; it keeps ``args``, or they are such results themselves."""
        output = run(*args)
        self._add(output, run, args)
        return output

    def norm(self, run: Callable[..., Any], x: Tensor, residual: Tensor | None = None) -> Any:
        """``run(x, residual)`` of a norm, which keeps x or its sum with the residual."""
        if residual is None:
            return self.of(run, x)
        normed, total = run(x, residual)
        self._add(normed, run, (total,))
        return normed, total

    def _add(self, result: Tensor, run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
        if not torch.is_grad_enabled() or not result.is_contiguous():
            return
        storage = result.untyped_storage()
        if storage.nbytes() != result.nbytes:  # a part of something
            return
        makers = (self._find(arg) for arg in args)
        inputs = tuple(
            self._keep_else(arg) if maker is None else maker for arg, maker in zip(args, makers, strict=True)
        )
        self._results[storage._cdata] = StorageWeakRef(storage), _Result(run, inputs, result._version)

    def _find(self, tensor: Tensor) -> _Result | None:
        """The result whose memory ``tensor`` is, or a view of; None where it was written to since it was made."""
        _, maker = self._results.get(tensor.untyped_storage()._cdata, (None, None))
        return None if maker is None or maker.version != tensor._version else maker

    def _keep(self, tensor: Tensor) -> Any:
        maker = self._find(tensor)
        if maker is None:
            return self._keep_else(tensor)
        maker.readers += 1
        return maker, tensor.size(), tensor.stride(), tensor.storage_offset()


def _take(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if not isinstance(kept, tuple):
        return kept.take()  # type: ignore[no-any-return]
    maker, *view = kept
    return maker.take().as_strided(*view)
