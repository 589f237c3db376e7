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
        momentum: of the inner optimizer.
    """

    def __init__(
        self, options: Mapping[str, Any], islands: int, shapes: Mapping[str, tuple[int, ...]], layers: int, lr: float,
        boxes: Sequence[Mapping[str, Collection[Box]]] = (), momentum: float = 0.0,
    ) -> None:  # fmt: skip
        rates = {"lr": 0.7, "momentum": 0.9, "nesterov": True, **options.get("optimizer", {})}
        rates["nesterov"] = rates["nesterov"] and rates["momentum"] > 0
        self.lr, self.momentum = lr, momentum
        self.fragments, self.delay = options.get("fragments", 1), options.get("delay", 0)
        self.mixing, self.period = options.get("mixing", 0.0), options["every"] // self.fragments
        self.layers = layers
        self.weights = [{name: np.ones(shape) for name, shape in shapes.items()} for _ in range(islands)]
        self._shared = {name: torch.ones(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self.optimizer = torch.optim.SGD(list(self._shared.values()), **rates)
        self.shared = {name: values.numpy() for name, values in self._shared.items()}  # the same memory
        self.compress, self.boxes = options.get("compress", "none"), list(boxes)
        self.lost = [{name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(islands)]
        self.moments = [{name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(islands)]
        self.tokens = np.zeros((self.fragments, islands))
        self.averages: Weights = {}  # of the exchange that has begun
        self._undo: tuple[int, np.ndarray, list[Weights]] | None = None  # what it took, as long as it may be torn
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

    def step(
        self, gradients: Sequence[Weights], tokens: Sequence[float], gone: Collection[int] = ()
    ) -> None:  # fmt: skip
        """One inner step of every island, and what is due after it, without those that are ``gone`` by then."""
        for weights, moments, grads in zip(self.weights, self.moments, gradients, strict=True):
            for name in weights:
                moments[name] = self.momentum * moments[name] + grads[name]
                weights[name] = weights[name] - self.lr * moments[name]
        self.tokens += tokens
        self.steps += 1
        if gone:
            self.lose(gone)
        fragment = (self.steps - 1) // self.period % self.fragments
        names = [name for name in self.shared if self._fragment(name) == fragment]
        position = (self.steps - 1) % self.period + 1
        if position >= self.period - self.delay and not self.averages:
            self._undo = fragment, self.tokens[fragment].copy(), [dict(lost) for lost in self.lost]
            shares = self.tokens[fragment] / self.tokens[fragment].sum()
            self.tokens[fragment] = 0
            for name in names:
                self.averages[name] = np.tensordot(shares, [self._sent(i, name) for i in range(len(shares))], 1)
        if position == self.period:
            self.optimizer.zero_grad()
            for name in names:
                self._shared[name].grad = torch.from_numpy(self.averages[name])
            self.optimizer.step()
            self.averages, self._undo = {}, None
            for name in names:
                for weights in self.weights:
                    weights[name] = (1 - self.mixing) * self.shared[name] + self.mixing * weights[name]

    def lose(self, gone: Collection[int]) -> None:
        """Islands are there no more: an exchange that has begun, and was not complete, has not begun."""
        if self._undo is not None:
            fragment, tokens, self.lost = self._undo
            self.tokens[fragment] += tokens
            self.averages, self._undo = {}, None
        left = [i for i in range(len(self.weights)) if i not in gone]
        for values in (self.weights, self.lost, self.moments, self.boxes):
            values[:] = [values[i] for i in left if values]
        self.tokens = self.tokens[:, left]

    def come(self, places: Sequence[int], boxes: Sequence[Mapping[str, Collection[Box]]]) -> None:
        """Islands begin at these places, ascending, from the global weights, with the first one's moments; an exchange
        that has begun is complete before."""
        self._undo, first = None, self.moments[0]
        for place in places:
            self.weights.insert(place, {name: values.copy() for name, values in self.shared.items()})
            self.lost.insert(place, {name: np.zeros_like(values) for name, values in self.shared.items()})
            self.moments.insert(place, dict(first))
            self.tokens = np.insert(self.tokens, place, 0, axis=1)
        self.boxes = list(boxes)
