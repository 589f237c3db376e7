"""Outer steps of islands in one process, by their definition (DiLoCo, arXiv 2311.08105; streaming: 2501.18512): what
islands of any plan are compared with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hetero_megatron.layout import Box
from tests.support.compress_reference import decoded

Weights = dict[str, np.ndarray]


class OuterReference:
    """Weights begin as ones, plain SGD is the inner optimizer and torch's the outer one.

    Args:
        options: the key ``outer`` of a plan, without its islands.
        layers: of the model, of which each fragment has a run, with the embedding in the first one and the rest in the
            last one.
        boxes: by island, the parts of each tensor that are rounded by themselves, with ``compress``.
    """

    def __init__(
        self, options: Mapping[str, Any], islands: int, shapes: Mapping[str, tuple[int, ...]], layers: int, lr: float,
        boxes: Sequence[Mapping[str, Collection[Box]]] = (),
    ) -> None:  # fmt: skip
        rates = {"lr": 0.7, "momentum": 0.9, "nesterov": True, **options.get("optimizer", {})}
        rates["nesterov"] = rates["nesterov"] and rates["momentum"] > 0
        self.lr = lr
        self.fragments, self.delay = options.get("fragments", 1), options.get("delay", 0)
        self.mixing, self.period = options.get("mixing", 0.0), options["every"] // self.fragments
        self.layers = layers
        self.weights = [{name: np.ones(shape) for name, shape in shapes.items()} for _ in range(islands)]
        self._shared = {name: torch.ones(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self.optimizer = torch.optim.SGD(list(self._shared.values()), **rates)
        self.shared = {name: values.numpy() for name, values in self._shared.items()}  # the same memory
        self.compress, self.boxes = options.get("compress", "none"), boxes
        self.lost = [{name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(islands)]
        self.tokens = np.zeros((self.fragments, islands))
        self.averages: Weights = {}
        self.steps = 0

    def _fragment(self, name: str) -> int:
        if ".layers." in name:
            return int(name.split(".")[2]) * self.fragments // self.layers
        return 0 if "embed" in name else self.fragments - 1

    def _sent(self, island: int, name: str) -> np.ndarray:
        """The island's difference as all islands decode it; what that loses is added to the next one."""
        exact = self.shared[name] - self.weights[island][name] + self.lost[island][name]
        sent = exact.copy()
        if self.compress != "none":
            for box in self.boxes[island][name]:
                sent[box.slices()] = decoded(exact[box.slices()], box, self.compress)
        self.lost[island][name] = exact - sent
        return sent

    def step(self, gradients: Sequence[Weights], tokens: Sequence[float]) -> None:
        """One inner step of every island, and what is due after it."""
        for weights, grads in zip(self.weights, gradients, strict=True):
            for name in weights:
                weights[name] = weights[name] - self.lr * grads[name]
        self.tokens += tokens
        fragment = self.steps // self.period % self.fragments
        names = [name for name in self.shared if self._fragment(name) == fragment]
        self.steps += 1
        if (self.steps + self.delay) % self.period == 0:
            shares = self.tokens[fragment] / self.tokens[fragment].sum()
            self.tokens[fragment] = 0
            for name in names:
                self.averages[name] = np.tensordot(shares, [self._sent(i, name) for i in range(len(shares))], 1)
        if self.steps % self.period == 0:
            self.optimizer.zero_grad()
            for name in names:
                self._shared[name].grad = torch.from_numpy(self.averages[name])
            self.optimizer.step()
            for name in names:
                for weights in self.weights:
                    weights[name] = (1 - self.mixing) * self.shared[name] + self.mixing * weights[name]
