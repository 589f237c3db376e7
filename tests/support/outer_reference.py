"""Outer steps of islands in one process, by their definition (DiLoCo, arXiv 2311.08105; streaming: 2501.18512): what
islands of any plan are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Weights = dict[str, np.ndarray]


class OuterReference:
    """Weights begin as ones, plain SGD is the inner optimizer and torch's the outer one.

    Args:
        options: the key ``outer`` of a plan, without its islands.
        layers: of the model, of which each fragment has a run, with the embedding in the first one and the rest in the
            last one.
    """

    def __init__(
        self, options: Mapping[str, Any], islands: int, shapes: Mapping[str, tuple[int, ...]], layers: int, lr: float
    ) -> None:
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
        self.tokens = np.zeros((self.fragments, islands))
        self.averages: Weights = {}
        self.steps = 0

    def _fragment(self, name: str) -> int:
        if ".layers." in name:
            return int(name.split(".")[2]) * self.fragments // self.layers
        return 0 if "embed" in name else self.fragments - 1

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
                self.averages[name] = np.tensordot(shares, [self.shared[name] - w[name] for w in self.weights], 1)
        if self.steps % self.period == 0:
            self.optimizer.zero_grad()
            for name in names:
                self._shared[name].grad = torch.from_numpy(self.averages[name])
            self.optimizer.step()
            for name in names:
                for weights in self.weights:
                    weights[name] = (1 - self.mixing) * self.shared[name] + self.mixing * weights[name]
