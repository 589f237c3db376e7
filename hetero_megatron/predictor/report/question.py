"""What was asked: model, batch, number formats, adapters, optimizer and the links that were assumed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_megatron.cluster import format_rate
from hetero_megatron.errors import UserError
from hetero_megatron.plan.fp8 import Fp8
from hetero_megatron.plan.made_for import lora_words
from hetero_megatron.plan.memory.of_plan import ADAM_MOMENTS
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.utils.text import format_seconds, plural

MOST_LINKS = 6  # that are written out


@dataclass(frozen=True)
class AskedLink:
    """Between two chips of a node of group ``a`` (``inside``), or two nodes of the groups ``a`` and ``b``.
    ``bandwidth``: bytes/s; ``latency``: seconds."""

    a: str
    b: str
    inside: bool
    bandwidth: float
    latency: float
    measured: bool

    def __str__(self) -> str:
        where = f"between {self.a} and {self.b}" if self.a != self.b else f"among {self.a}"
        where = f"inside {self.a}" if self.inside else where
        how = " (measured)" if self.measured else ""
        return f"{where} {format_rate(self.bandwidth)}, {format_seconds(self.latency)}{how}"


@dataclass(frozen=True)
class Question:
    """What a plan was made or predicted for. ``moments``: of the optimizer, per element."""

    model: ModelSpec
    seq_length: int
    global_batch_size: int
    dtype: str
    fp8: Fp8 | None
    moments: int
    margin: float
    links: tuple[AskedLink, ...]

    @property
    def optimizer(self) -> str:
        return "adam" if self.moments == ADAM_MOMENTS else "sgd"

    def rows(self) -> list[tuple[str, str]]:
        """(what, in words)."""
        model, tokens = self.model, self.seq_length * self.global_batch_size
        billions = f"{parameter_count(model) / 1e9:.3g} billion parameters"
        trained = f"adapters, {' '.join(lora_words(model.lora))}" if model.lora is not None else "all weights"
        computes = f", and {self.fp8} where chips have it and it pays" if self.fp8 is not None else ""
        links = [str(link) for link in self.links[:MOST_LINKS]]
        if len(self.links) > MOST_LINKS:
            links.append(f"and {len(self.links) - MOST_LINKS} more")
        return [
            ("model", f"{model.name}: {plural(model.num_layers, 'layer')}, {billions}"),
            ("step", f"{plural(self.global_batch_size, 'sequence')} of {self.seq_length:,} tokens = {tokens:,} tokens"),
            ("computes in", f"{self.dtype}{computes}"),
            ("trains", f"{trained}; optimizer {self.optimizer}; {self.margin:.0%} of each chip's memory stays free"),
            *([("links priced", "; ".join(links))] if links else []),
        ]  # fmt: skip

    def as_json(self) -> Mapping[str, Any]:
        return {
            "model": self.model.name,
            "seq_length": self.seq_length,
            "global_batch_size": self.global_batch_size,
            "dtype": self.dtype,
            "fp8": None if self.fp8 is None else {"format": self.fp8.format, "recipe": self.fp8.recipe},
            "adapters": None if self.model.lora is None else dict(self.model.lora.shape()),
            "optimizer": self.optimizer,
            "memory_margin": self.margin,
            "links": [
                vars(link) | {"bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None}
                for link in self.links
            ],
        }


def question(costs: CostModel, global_batch_size: int) -> Question:
    """Of a cost model, which has the cluster and all options."""
    options = costs.options
    return Question(
        costs.model, costs.seq_length, global_batch_size, costs.dtype, options.fp8, options.moments, options.margin,
        _links(costs),
    )  # fmt: skip


def _links(costs: CostModel) -> tuple[AskedLink, ...]:
    """Inside nodes of each group, then between nodes; links of which nothing is known are not used."""
    rates, nodes, found = costs.links.rates, costs.cluster.nodes, []
    ways = [(node.name, node.name, True) for node in nodes if node.chips_per_node > 1]
    ways += [(node.name, node.name, False) for node in nodes if node.count > 1]
    ways += [(a.name, b.name, False) for a, b in itertools.combinations(nodes, 2)]
    for way in ways:
        try:
            link = rates.between(*way).as_link()
        except UserError:
            continue
        found.append(AskedLink(*way, link.bandwidth, link.latency, way in rates.measured))
    return tuple(found)


def format_question(asked: Question) -> str:
    """One line per row."""
    return "\n".join(f"{name + ':':<14}{text}" for name, text in asked.rows())
