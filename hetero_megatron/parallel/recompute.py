"""Activation recomputation, applied to a plain model stage from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hetero_megatron.model import GPTStage
from hetero_megatron.model.layers import CoreAttention
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.parallel.context import ContextAttention
from hetero_megatron.parallel.tensor import RowParallelLinear
from hetero_megatron.plans import Recompute

# What is kept of a tensor from forward to backward: the tensor itself, or something whose ``take()`` gives it again.
Keep = Callable[[torch.Tensor], Any]


def keep_here(tensor: torch.Tensor) -> torch.Tensor:
    """Where it is; without the graph behind it, which would be held by the graph that comes after it."""
    return tensor.detach()


def take(kept: Any) -> torch.Tensor:
    """The tensor of which something was kept."""
    return kept if isinstance(kept, torch.Tensor) else kept.take()


def apply_recompute(stage: GPTStage, recompute: Recompute, keep: Keep = keep_here) -> None:
    """Keep only the inputs of the chosen modules in forward; compute them again in backward.

    ``selective`` recomputes the attention core, ``elementwise`` what norms and activations put out, ``full`` every
    decoder layer, ``first`` the stage's first n layers.
    Collectives inside a recomputed layer run again, in the same order on every rank of its TP group.

    Args:
        keep: of what is kept of a layer.
    """
    layers = list(stage.layers())
    if recompute.kind == "selective":
        for mixer in (layer.mixer for layer in layers if layer.mixer is not None):
            _recompute(cast(nn.Module, mixer.core_attention), keep)
    if recompute.kind == "elementwise":
        from hetero_megatron.parallel.elementwise import apply_elementwise

        for layer in layers:
            apply_elementwise(layer, keep)
    for layer in layers[: recompute.whole(len(layers))]:
        layer.takes_sum = False  # two tensors would be kept for it, not one
        _recompute(layer, keep)


def keep_inputs(stage: GPTStage) -> None:
    """Have recomputed modules hold their inputs until backward's graph goes, for whoever goes through it again."""
    for module in filter(is_recomputed, stage.modules()):
        run = cast(partial[Any], module.forward).args[0]
        module.forward = partial(run_again_in_backward, run, lasting=True)  # type: ignore[method-assign]


def is_recomputed(module: nn.Module) -> bool:
    return getattr(module.forward, "func", None) is run_again_in_backward


def _recompute(module: nn.Module, keep: Keep) -> None:
    module.forward = partial(run_again_in_backward, module.forward, keep=keep)  # type: ignore[method-assign]


def run_again_in_backward(
    run: Callable[..., Any], *args: Any, lasting: bool = False, keep: Keep = keep_here
) -> Any:
    """``run(*args)``, of which backward keeps the inputs only: the first tensor that it asks for runs ``run`` again.

    What ``torch.utils.checkpoint`` does without re-entering autograd, for modules that draw no random numbers (dropout
    is refused) outside of ``torch.compile``: a third of its cost per call, and none of the compiler that it imports
    (0.5 s and 100 MB of a rank).

    Args:
        run: deterministic; saves the same tensors each time. It must not write into its inputs.
        args: of tensors, those that gradients are for; what other objects hold has none.
        lasting: hold them longer than the first backward needs them.
        keep: of tensors among them.
    """
    if not torch.is_grad_enabled():
        return run(*args)
    kept = _Kept(run, args, lasting, keep)
    with saved_tensors_hooks(kept.count, kept.take):
        return run(*args)


class _Enough(Exception):
    """Every tensor that backward needs has been computed again: what comes after the last one need not be."""


class _Kept:
    """What one call leaves for backward."""

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...], lasting: bool, keep: Keep) -> None:
        self._run, self._lasting = run, lasting
        self._args = [keep(a) if isinstance(a, torch.Tensor) else a for a in args]
        self._inputs = [(i, a.requires_grad, a._version) for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._again: dict[int, torch.Tensor] | None = None

    def count(self, tensor: torch.Tensor) -> int:
        """Forward saves its ``n``-th tensor: only n is kept."""
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def take(self, index: int) -> torch.Tensor:
        """Backward asks for a tensor, each one once."""
        if self._again is None:
            self._again = self._compute()
        return self._again.pop(index)

    def _compute(self) -> dict[int, torch.Tensor]:
        recomputed: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> None:
            index = len(recomputed)
            assert (tensor.shape, tensor.dtype) == self._saved[index], "a recomputed module saves other tensors"
            recomputed[index] = tensor.detach()  # nobody goes backward through the second graph
            if len(recomputed) == len(self._saved):
                raise _Enough

        args = list(self._args)
        for i, needs_gradient, version in self._inputs:
            argument = args[i]
            assert not isinstance(argument, torch.Tensor) or argument._version == version, (
                "an input of a recomputed module was written to"
            )
            args[i] = take(argument).requires_grad_(needs_gradient)
        if not self._lasting:
            self._args = []
        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, _never):
                self._run(*args)
        except _Enough:
            return recomputed
        raise AssertionError(f"a recomputed module saved {len(recomputed)} tensors instead of {len(self._saved)}")


def _never(_: None) -> torch.Tensor:
    raise AssertionError("nobody goes backward through what was computed again")


def apply_compile(stage: GPTStage, backend: str) -> None:
    """Compile attention, MLP and norms of every layer, one graph each and one compilation for all layers of a kind.

    Collectives stay outside: they are in hooks around the modules or in modules that are left as they are. Of a mixture
    of experts only the shared expert is compiled: how many rows an expert has is known when it runs. Linear attention
    is not: its operators are no torch operators.
    """
    for layer in stage.layers():
        for module in layer.modules():
            recomputed = module is not layer and is_recomputed(module)  # a whole layer's blocks are compiled inside it
            dropped = isinstance(module, CoreAttention) and module.dropout > 0  # its key is another in every call
            if recomputed or dropped or isinstance(module, (RowParallelLinear, ContextAttention)):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        mlp = layer.mlp.shared_expert if isinstance(layer.mlp, MoEMLP) else layer.mlp
        for block in (layer.norms()[0], None if layer.kind.linear else layer.mixer, mlp):
            if block is None:
                continue
            block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
