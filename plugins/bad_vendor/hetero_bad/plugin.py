"""One defect per kernel. ``DEFECTS`` says which check of the conformance kit must fail, by kernel."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hetero_megatron.ops import SPECS, Kernel
from hetero_megatron.ops.registry import torch_registry
from hetero_megatron.ops.spec import VENDOR, Capability
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1

# kernel -> (check that must fail, words of its message)
DEFECTS = {
    "rms_norm:no_backward": ("registration", "it has no backward"),
    "rms_norm:twice": ("registration", "registered twice"),
    "attention:base_two": ("forward", "base 2"),
    "swiglu:only_fp32": ("dtypes", "raised"),
    "layer_norm:wide_result": ("result dtypes", "float32, not torch.bfloat16"),
    "gelu:beyond_the_end": ("bounds", "out of bounds: 1 after"),
    "softmax:last_row_missing": ("forward", "were not written"),
    "squared_relu:noisy": ("deterministic", "unequal bits"),
    "rope:wrong_sign": ("backward", "q: error"),
    "cross_entropy:other_state": ("saved state", "lse"),
    "add_rms_norm:eats_input": ("bounds", "changed an argument"),
    "gemm:half_the_gradient": ("backward", "weight: "),
    "gemm:no_parts": ("registration", "it lacks the part input"),
    "gemm:sums_in_16_bits": ("weight gradient", "the sum of torch.float32 is off by"),
    "gemm:forgets_the_sum": ("weight gradient", "the sum of torch.float32 is off by"),
    "gemm:sums_beyond_the_end": ("bounds", "out of bounds: 1 after an argument"),
    "gemm:no_last_row": ("training", "were not written"),
    "attention:rounded_share": ("tiles", "share returned torch.bfloat16"),
    "attention:share_of_its_own": ("tiles", "error"),
    "attention:delta_by_token": ("tiles", "delta is (2, 13, 4), not (2, 4, 13)"),
    "attention:half_a_delta": ("tiles", "error"),
    "swiglu:apply_loses_a_gradient": ("training", "gate: error"),
    "l2norm:nowhere": ("supports", "nothing of it was checked: device cpu, not acme"),
    "linear_cross_entropy:one_value": ("backward", "not a tuple of 2"),
    "linear_cross_entropy:forgets_the_sum": ("loss and gradients", "dweight is off by"),
}


def _good(op: str) -> Kernel:
    """The reference, to be spoiled."""
    return torch_registry().kernel(op, "reference")


def _bad(name: str, **changes: Any) -> Kernel:
    op, _, provider = name.partition(":")
    return replace(_good(op), provider=provider, kind=VENDOR, traceable=False, **changes)


def _then(op: str, change: Callable[[tuple[Any, ...]], tuple[Any, ...]], forward: bool = True) -> Callable[..., Any]:
    """The good function of ``op``, its results changed."""
    good = _good(op).forward if forward else SPECS[op].backward
    assert good is not None
    return lambda *args: change(good(*args))


def _base_two(made: tuple[Any, ...]) -> tuple[Any, ...]:
    return made[0], made[1] / math.log(2)


def _only_fp32(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor]:
    """Its capability claims all dtypes."""
    if gate.dtype != torch.float32:
        raise TypeError("fp32 only")
    return (torch.nn.functional.silu(gate) * up,)


def _wide(made: tuple[Any, ...]) -> tuple[Any, ...]:
    return made[0].float(), *made[1:]


def _beyond(x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor]:
    """Writes one element too many, as a kernel with a wrong mask does."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    one_more = out.as_strided((out.numel() + 1,), (1,), out.storage_offset())
    values = torch.nn.functional.gelu(x, approximate="tanh" if tanh else "none").reshape(-1)
    one_more.copy_(torch.cat([values, values.new_ones(1)]))
    return (out,)


def _missing(x: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    values = _good("softmax").forward(x, scale, causal)[0]
    out[:-1] = values[:-1]
    return (out,)


def _noisy(x: torch.Tensor) -> tuple[torch.Tensor]:
    """Nearly within tolerance, and never the same twice: like sums in an order that changes."""
    y = torch.relu(x).square().float() * (1 + 3e-7 * (random.random() - 0.5))
    order = torch.randperm(y.numel())[:8]
    y.view(-1)[order] *= 1 + torch.finfo(x.dtype).eps
    return (y.to(x.dtype),)


def _eats(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[Any, ...]:
    made = _good("add_rms_norm").forward(x, residual, weight, eps)
    x.zero_()
    return made


def _sums_in_16_bits(dy: torch.Tensor, x: torch.Tensor, into: Any = None, beta: float = 1.0) -> torch.Tensor:
    product = (dy.flatten(0, -2).t().float() @ x.flatten(0, -2).float()).to(x.dtype)
    if into is None:
        return product
    return into.copy_(into.to(x.dtype) + product if beta else product)  # type: ignore[no-any-return]


def _forgets_the_loss_sum(x: Any, weight: Any, labels: Any, dloss: Any, into: Any = None, beta: float = 1.0) -> Any:
    return _good("linear_cross_entropy").parts["fwd_bwd"](x, weight, labels, dloss, into, 0.0)


def _forgets_the_sum(dy: torch.Tensor, x: torch.Tensor, into: Any = None, beta: float = 1.0) -> Any:
    return _good("gemm").parts["weight"](dy, x, into, 0.0)


def _sums_beyond(dy: torch.Tensor, x: torch.Tensor, into: Any = None, beta: float = 1.0) -> Any:
    """Right, and one element more: harm that only the fence around the buffer shows."""
    if into is not None:
        into.as_strided((1,), (1,), into.storage_offset() + into.numel()).fill_(1.0)
    return _good("gemm").parts["weight"](dy, x, into, beta)


def _no_last_row(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    made: Any = _good("gemm").parts["input"](dy, weight)
    out = torch.empty(made.shape, dtype=made.dtype, device=made.device)
    out[:-1] = made[:-1]
    return out


def _share(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor | None, window: int | None, q_start: int, k_start: int, softcap: float | None,
    dropout: Any = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """A good one: in fp32; where ``delta`` is given, ``out`` is not looked at."""
    run = _good("attention").backward
    assert run is not None
    if delta is not None:  # a vector in place of out that has this product with dout
        given = delta.transpose(1, 2)[..., None]
        out = given * dout.float() / dout.float().square().sum(-1, keepdim=True)
    wide = (x.float() for x in (q, k, v))
    return run(dout.float(), *wide, None, out.float(), lse, None, window, q_start, k_start, softcap, dropout)[:3]


def _delta(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return (dout.float() * out.float()).sum(-1).transpose(1, 2)


def _rounded_share(*args: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(args[1].dtype) for x in _share(*args))


def _share_of_its_own(*args: Any) -> tuple[torch.Tensor, ...]:
    """Takes the log-sum-exp of the keys that it sees for that of all."""
    dout, q, k, v, out, _, delta, *options = args
    lse = _good("attention").forward(q, k, v, None, None, *options)[1]
    return _share(dout, q, k, v, out, lse, delta, *options)


def _loses_a_gradient(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate.detach()) * up


def register(api: PluginApi) -> None:
    api.kernel(_bad("rms_norm:no_backward", backward=None))
    api.kernel(_bad("rms_norm:twice"))
    api.kernel(_bad("rms_norm:twice"))
    api.kernel(_bad("attention:base_two", forward=_then("attention", _base_two)))
    api.kernel(_bad("swiglu:only_fp32", forward=_only_fp32))
    api.kernel(_bad("layer_norm:wide_result", forward=_then("layer_norm", _wide)))
    api.kernel(_bad("gelu:beyond_the_end", forward=_beyond))
    api.kernel(_bad("softmax:last_row_missing", forward=_missing))
    api.kernel(_bad("squared_relu:noisy", forward=_noisy))
    api.kernel(_bad("rope:wrong_sign", backward=SPECS["rope"].forward))
    api.kernel(_bad("cross_entropy:other_state", forward=_then("cross_entropy", lambda made: (made[0], 2 * made[1]))))
    api.kernel(_bad("add_rms_norm:eats_input", forward=_eats))
    api.kernel(
        _bad("gemm:half_the_gradient", backward=_then("gemm", lambda g: (g[0], g[1] / 2, g[2]), forward=False))
    )
    api.kernel(_bad("gemm:no_parts", parts={}))
    for name, part in {
        "sums_in_16_bits": {"weight": _sums_in_16_bits}, "forgets_the_sum": {"weight": _forgets_the_sum},
        "sums_beyond_the_end": {"weight": _sums_beyond}, "no_last_row": {"input": _no_last_row},
    }.items():  # fmt: skip
        api.kernel(_bad(f"gemm:{name}", parts={**_good("gemm").parts, **part}))
    for name, parts in {
        "rounded_share": {"share": _rounded_share, "delta": _delta}, "share_of_its_own": {"share": _share_of_its_own},
        "delta_by_token": {"share": _share, "delta": lambda dout, out: _delta(dout, out).transpose(1, 2)},
        "half_a_delta": {"share": _share, "delta": lambda dout, out: _delta(dout, out) / 2},
    }.items():  # fmt: skip
        api.kernel(_bad(f"attention:{name}", parts=parts))
    api.kernel(_bad("swiglu:apply_loses_a_gradient", apply=_loses_a_gradient))
    api.kernel(_bad("l2norm:nowhere", capability=Capability(devices=("acme",))))
    api.kernel(
        _bad("linear_cross_entropy:one_value", backward=_then("linear_cross_entropy", lambda g: g[:1], forward=False))
    )
    api.kernel(_bad("linear_cross_entropy:forgets_the_sum", parts={"fwd_bwd": _forgets_the_loss_sum}))
