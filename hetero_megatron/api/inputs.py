"""Models and clusters as a program names them. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from hetero_megatron import cluster as clusters
from hetero_megatron.cluster.dump import document
from hetero_megatron.cluster.subset import with_more, without
from hetero_megatron.predictor.cost.link_model import capped_bridges
from hetero_megatron.spec import Lora, ModelSpec, adapted, load_model
from hetero_megatron.spec.adapter_modules import default_targets
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.utils.outputs import write_text
from hetero_megatron.utils.yaml_document import QuotingDumper


@dataclass(frozen=True, init=False)
class Model:
    """The shapes of a model.

    Args:
        source: a preset ("llama3-8b"), a directory in Hugging Face's form, a config.json, or the data of one.

    Raises:
        UserError: no such preset or file, or a configuration that cannot be honoured.

    Attributes:
        spec: all that counts of it.
        source: what ``--model`` would say; empty for a configuration that was given as data.
    """

    spec: ModelSpec
    source: str

    def __init__(self, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        if isinstance(source, Mapping):
            spec, name = from_hf_config(source, where="configuration"), ""
        else:
            name = os.fspath(source)
            spec = load_model(name)
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "source", name)

    @staticmethod
    def of(spec: ModelSpec, source: str = "") -> Model:
        """Of shapes that are known."""
        model = Model.__new__(Model)
        object.__setattr__(model, "spec", spec)
        object.__setattr__(model, "source", source)
        return model

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def parameters(self) -> int:
        """How many numbers its weights are, adapters left out; tied weights once."""
        return parameter_count(self.spec.base)

    def with_lora(
        self, rank: int, targets: Sequence[str] | None = None, *, dropout: float = 0.0, dora: bool = False,
        base_dtype: str | None = None, layers: Sequence[int] | None = None, sites: Sequence[str] | None = None,
    ) -> Model:  # fmt: skip
        """The model with trained adapters beside a frozen base.

        Args:
            rank: rows of A and columns of B.
            targets: projections that get one ("q_proj", "down_proj", …), or one regular expression over names of the
                model's modules; None: all linear layers.
            dropout: share of their inputs that they drop in training.
            dora: their rows are scaled to trained lengths.
            base_dtype: "int8" or "nf4": the frozen projections are stored so; None: as the run computes.
            layers: that have adapters; None: all.
            sites: instead, all adapters where they differ by layer: "LAYERS:NAMES:RANK", such as "0-3,7:q_proj:16".

        Raises:
            UserError: a value out of its range, or projections that the model does not have.
        """
        from hetero_megatron.spec.adapter_places import chosen

        lora = Lora(rank, float(rank), default_targets(self.spec), dropout=dropout, dora=dora, base_dtype=base_dtype)
        numbers = None if layers is None else list(map(str, layers))
        return Model.of(adapted(self.spec, chosen(self.spec, lora, targets, numbers, sites)), self.source)

    def stretched(self, seq_length: int) -> Model:
        """With at least so many positions, where they are not learned."""
        if seq_length <= self.spec.max_position_embeddings or self.spec.position != "rope":
            return self
        return Model.of(replace(self.spec, max_position_embeddings=seq_length), self.source)


@dataclass(frozen=True)
class Cluster:
    """Nodes, chips, links and rates. Read one with :meth:`read`, or make one of data with :meth:`of`."""

    described: clusters.Cluster

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Cluster:
        """A cluster file, or an MPI host file. UserError: it cannot be read, names the line."""
        return Cluster(clusters.load_cluster(os.fspath(path)))

    @staticmethod
    def of(data: Mapping[str, Any]) -> Cluster:
        """The data of a cluster file: ``{"nodes": [{"name": "a", "count": 2, "chip": "A100-40-SXM", …}], …}``."""
        return Cluster(clusters.cluster_from_dict(data))

    @property
    def ranks(self) -> int:
        """How many chips there are."""
        return self.described.world_size

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names, in the order of their ranks."""
        return tuple(dict.fromkeys(rank.node for rank in self.described.ranks))

    @property
    def chips(self) -> dict[str, int]:
        """How many of each kind."""
        kinds = [rank.chip for rank in self.described.ranks]
        return {chip: kinds.count(chip) for chip in dict.fromkeys(kinds)}

    @property
    def notices(self) -> list[str]:
        """What is assumed of links that were not measured."""
        return capped_bridges(self.described)

    def without(self, *nodes: str) -> Cluster:
        """Without these nodes ("fast-1") or groups of nodes ("fast"). UserError: no such node, or nothing is left."""
        return Cluster(without(self.described, nodes))

    def with_more(self, text: str) -> Cluster:
        """With more nodes: "2xH100-node"; a group, a chip of the cluster, or a prefix of one of the catalogue."""
        return Cluster(with_more(self.described, text))

    def text(self) -> str:
        """As a cluster file."""
        return yaml.dump(document(self.described), sort_keys=False, Dumper=QuotingDumper)

    def write(self, path: str | os.PathLike[str]) -> None:
        """As a file, whole or not at all."""
        write_text(path, "path", self.text())


def positions_notice(model: Model, seq_length: int) -> list[str]:
    """The flag that training needs for sequences longer than what a model is made for; nothing for others."""
    if model.stretched(seq_length) is model:
        return []
    needs = f"training at {seq_length} needs --max-position-embeddings {seq_length}"
    return [f"{model.name} is made for {model.spec.max_position_embeddings} positions; {needs}"]
