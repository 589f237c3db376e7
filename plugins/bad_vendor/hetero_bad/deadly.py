"""A second plugin: kernels that harm the process that runs them. ``DEADLY`` says what the conformance kit must say.

Never load it into a process that matters. Each kernel is right until it is called in the case that it was made for, so
that the rest of its checks shows whether only that case is lost.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hetero_megatron.ops import Kernel
from hetero_megatron.ops.registry import torch_registry
from hetero_megatron.ops.spec import VENDOR
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1
ODD = 3 * 7 * 13  # elements of the case in which harm is done

# provider -> (check that must fail, words of its message); all are kernels of squared_relu
DEADLY = {
    "segfault": ("forward", "by SIGSEGV"),
    "frees_what_is_not_its_own": ("forward", "by SIGABRT: "),
    "stores_without_mask": ("bounds", "wrote out of bounds: 1 after"),
    "stores_far_away": ("forward", "by SIGSEGV"),
    "exits_well": ("forward", "ended its process with exit code 0"),
    "sys_exit": ("forward", "raised SystemExit: 3"),
    "interrupts": ("forward", "raised KeyboardInterrupt"),
    "odd_error": ("forward", "its message cannot be read"),
    "never_ends": ("forward", "did not end within"),
    "kills_its_parent": ("forward", "ended the process that started its own"),
    "closes_files": ("forward", "closed file descriptors"),
    "writes_everywhere": ("forward", "wrote into a file descriptor"),
    "takes_all_memory": ("forward", "of memory"),
    "number": ("dtypes", "is of type float, not a tensor"),
    "no_tuple": ("dtypes", "returned Tensor, not a tuple"),
    "another_shape": ("forward", "shape"),
    "another_device": ("dtypes", "on meta"),
    "integers": ("forward", "it is torch.int64"),
    "writes_its_input": ("bounds", "changed an argument"),
    "default_dtype": ("global state", "default dtype from torch.float32 to torch.float64"),
    "threads": ("global state", "number of threads"),
    "settings": ("global state", "deterministic algorithms"),
    "draws": ("global state", "random numbers"),
}


def _good() -> Kernel:
    return torch_registry().kernel("squared_relu", "reference")


class _Odd(BaseException):
    def __str__(self) -> str:
        raise ValueError("no message")


def _odd(x: torch.Tensor) -> None:
    raise _Odd


def _kill(x: torch.Tensor) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def _write_everywhere(x: torch.Tensor) -> None:
    for handle in range(3, 64):
        try:
            os.write(handle, b"anything\n")
        except OSError:
            continue


def _take(x: torch.Tensor) -> None:
    kept = []
    while True:
        kept.append(torch.ones(1 << 24))
        time.sleep(0.01)


def _spin(x: torch.Tensor) -> None:
    while True:
        pass


def _interrupt(x: torch.Tensor) -> None:
    raise KeyboardInterrupt


def _free(x: torch.Tensor) -> None:
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    print("about to free", flush=True)
    free(x.data_ptr() + 8)


def _settings(x: torch.Tensor) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


# What a kernel does before it computes the right result.
HARM: dict[str, Callable[[torch.Tensor], object]] = {
    "segfault": lambda x: ctypes.string_at(0),
    "frees_what_is_not_its_own": _free,
    "stores_far_away": lambda x: ctypes.memset(x.data_ptr() + (1 << 44), 0, 1),
    "exits_well": lambda x: os._exit(0),
    "sys_exit": lambda x: sys.exit(3),
    "interrupts": _interrupt,
    "odd_error": _odd,
    "never_ends": _spin,
    "kills_its_parent": _kill,
    "closes_files": lambda x: os.closerange(0, 1024),
    "writes_everywhere": _write_everywhere,
    "takes_all_memory": _take,
    "default_dtype": lambda x: torch.set_default_dtype(torch.float64),
    "threads": lambda x: torch.set_num_threads(7),
    "settings": _settings,
    "draws": lambda x: torch.rand(1),
}

# What it returns in place of the right result y.
MADE: dict[str, Callable[[torch.Tensor], object]] = {
    "number": lambda y: (1.0,),
    "no_tuple": lambda y: y,
    "another_shape": lambda y: (y.reshape(-1)[:1],),
    "another_device": lambda y: (y.to("meta"),),
    "integers": lambda y: (y.long(),),
}


def _harmful(harm: Callable[[torch.Tensor], object]) -> Callable[..., Any]:
    """Right, but for the case "odd"."""

    def forward(x: torch.Tensor) -> Any:
        if x.numel() == ODD:
            harm(x)
        return _good().forward(x)

    return forward


def _stores_without_mask(x: torch.Tensor) -> tuple[torch.Tensor]:
    """Writes whole blocks of 1,024 elements, as a Triton kernel whose store has no mask does."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out.copy_(torch.relu(x).square())
    more = -out.numel() % 1024
    ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 0, more * out.element_size())
    return (out,)


def _writes_its_input(x: torch.Tensor) -> tuple[torch.Tensor]:
    y = _good().forward(x)
    x.fill_(7)
    return y


def _returns(change: Callable[[torch.Tensor], object]) -> Callable[..., Any]:
    return lambda x: change(_good().forward(x)[0])


def register(api: PluginApi) -> None:
    print("a plugin that prints")
    forwards = {name: _harmful(harm) for name, harm in HARM.items()}
    forwards |= {name: _returns(change) for name, change in MADE.items()}
    forwards |= {"stores_without_mask": _stores_without_mask, "writes_its_input": _writes_its_input}
    for name in DEADLY:
        api.kernel(replace(_good(), provider=name, kind=VENDOR, traceable=False, forward=forwards[name]))
