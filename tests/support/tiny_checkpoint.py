"""Checkpoints of a few numbers, saved and loaded in this process: what can happen to their files needs no model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.native import CheckpointSaver, open_checkpoint
from hetero_megatron.comm import Comm, Group
from hetero_megatron.layout import Box

SHAPES = {"model.matrix": (5, 4), "model.vector": (3,), "optimizer.exp_avg.matrix": (5, 4)}
EXTRA = {"tokenizer.json": b"{}"}


def alone() -> Group:
    return Group(Comm(0, torch.device("cpu"), timedelta(0)), (0,), None)


def values(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=made, dtype=torch.float64) for name, shape in SHAPES.items()}


def boxed(tensors: dict[str, torch.Tensor]) -> dict[str, BoxedTensor]:
    """Every tensor in two boxes of rows."""
    out = {}
    for name, tensor in tensors.items():
        whole = Box.whole(tuple(tensor.shape))
        parts = [whole.rows(0, 2), whole.rows(2, tensor.shape[0])]
        out[name] = BoxedTensor(tuple(tensor.shape), [(box, tensor[box.slices()]) for box in parts])
    return out


def save(path: Path, step: int, seed: int, keep: int = 0, check: Callable[[], None] | None = None) -> None:
    saver = CheckpointSaver(str(path), alone(), keep=keep, asynchronous=False, extra=EXTRA, check=check)
    state = {"step": step, "seed": seed}
    saver.save(step, boxed(values(seed)), state, {}, lambda _: {"optimizer": None})


def load(
    path: Path, step: int | None = None, previous: bool = False, log: Callable[[str], None] = print
) -> tuple[int, int, dict[str, torch.Tensor]] | None:
    """(step, seed, tensors); None where there is nothing to load."""
    found = open_checkpoint(str(path), None, step, previous, log)
    if found is None:
        return None
    tensors = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in SHAPES.items()}
    found.read_into(boxed(tensors), alone())
    assert found.model_files().native() == EXTRA
    return found.step, int(found.state["seed"]), tensors
