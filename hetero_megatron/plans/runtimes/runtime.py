"""What a runtime can express, and what its files say: the records that the formats of this package share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel, layout_stages
from hetero_megatron.utils.foreign_keys import KeyTable
from hetero_megatron.utils.yaml_document import Entry


def replicas(flags: MegatronParallel) -> int:
    """Data-parallel degree."""
    return flags.world_size // (flags.tensor_model_parallel_size * flags.pipeline_model_parallel_size)


@dataclass(frozen=True)
class RuntimeLaunch:
    """What is written for a runtime.

    Attributes:
        flags: the degrees of the plan.
        dtype: of weights and activations.
        num_layers: of the model.
        nodes: in the order in which they have to be started; empty: that of the cluster file.
        per_node: ranks of each node; 0: unlike numbers.
    """

    flags: MegatronParallel
    dtype: str
    num_layers: int
    nodes: tuple[str, ...] = ()
    per_node: int = 0

    @property
    def replicas(self) -> int:
        """Data-parallel degree."""
        return replicas(self.flags)

    @property
    def micro_batches(self) -> int:
        """Of each data-parallel replica in a step."""
        assert self.flags.global_batch_size is not None
        return self.flags.global_batch_size // (self.replicas * self.flags.micro_batch_size)

    @property
    def layers(self) -> list[int]:
        """Decoder layers of each (virtual) stage, in the order of the model."""
        stages = self.flags.pipeline_model_parallel_size
        if self.flags.pipeline_model_parallel_layout is None:
            return [self.num_layers // stages] * stages
        return layout_stages(self.flags.pipeline_model_parallel_layout, stages, self.num_layers)[0]

    def heading(self) -> str:
        """How to start it, as comments of a file that has some."""
        per_node = f"--nproc-per-node {self.per_node} " if self.per_node else ""
        lines = [f"# {self.flags.world_size} ranks: torchrun {per_node}--nnodes {len(self.nodes) or 1}"]
        if self.nodes:
            lines.append(NODES + ", ".join(self.nodes))
        return "\n".join(lines) + "\n"


NODES = "# nodes in the order of their ranks: "


@dataclass(frozen=True)
class GivenSizes:
    """What is known beside a file: of the command line, the cluster and the model. None: not said."""

    world_size: int
    num_layers: int
    seq_length: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None

    def size(self, name: str, written: int | None, where: str) -> int:
        """A size that the file says or the command line: ``name`` as a field of this record.

        Raises:
            UserError: neither says it, or they disagree.
        """
        flag_value, flag = getattr(self, name), "--" + name.replace("_", "-")
        if written is None and flag_value is None:
            raise UserError("missing: the file does not say it", field=flag, accepted="an integer >= 1", where=where)
        if None not in (written, flag_value) and written != flag_value:
            raise UserError(f"the file says {written}", field=flag, value=flag_value, accepted="the same", where=where)
        return int(written if written is not None else flag_value)


@dataclass(frozen=True)
class LoadedConfig:
    """What a runtime's file says; ``dtype``: None: nothing."""

    flags: MegatronParallel
    dtype: str | None = None


@dataclass(frozen=True)
class ForeignRuntime:
    """A runtime and its file format.

    Attributes:
        tensor, pipeline: it can divide layers, and the model's depth.
        uneven: its stages may have unlike numbers of layers.
        recompute: kinds of recomputation.
        weights: whether every replica has all weights (None), or its part: given up after forward (True) or not.
        dtypes: of weights and activations.
        write: the text of a file.
        read: what a file says; None: the command line's own table reads it.
    """

    name: str
    tensor: bool
    pipeline: bool
    uneven: bool
    recompute: tuple[str, ...]
    weights: tuple[bool | None, ...]
    dtypes: tuple[str, ...]
    write: Callable[[RuntimeLaunch], str]
    read: Callable[[str, str, GivenSizes], LoadedConfig] | None = None

    def check(self, flags: MegatronParallel, dtype: str) -> None:
        """Refuse degrees that it has not.

        Raises:
            UserError: names the flag.
        """
        kind = {None: "none", "full": "full" if flags.recompute_method != "block" else "first"}.get(
            flags.recompute_granularity, "selective" if flags.recompute_modules is None else "elementwise"
        )
        sharded = None if not flags.use_torch_fsdp2 else not flags.torch_fsdp2_no_reshard_after_forward
        weights_words = (
            "every replica has all weights" if sharded is None else "each replica has its part of the weights"
        )
        weights_words += {None: "", True: ", given up after forward", False: ", kept until backward"}[sharded]
        rules: list[tuple[bool, str, Any, str]] = [
            (self.tensor, "tensor parallelism", flags.tensor_model_parallel_size, "1"),
            (self.pipeline, "pipeline parallelism", flags.pipeline_model_parallel_size, "1"),
            (self.uneven, "stages of unlike layers", flags.pipeline_model_parallel_layout or 1, "equal layers"),
        ]
        for able, feature, value, accepted in rules:
            if not able and value != 1:
                raise UserError(f"{self.name} has no {feature}", field="plan", value=value, accepted=accepted)
        for feature, chosen, options in (
            ("recompute", kind, self.recompute), ("dtype", dtype, self.dtypes),
            ("schedule", flags.schedule or "1f1b", ("1f1b",)),
        ):  # fmt: skip
            if chosen not in options:
                problem = f"{self.name} cannot say this {feature}"
                raise UserError(problem, field=feature, value=chosen, accepted=", ".join(options))
        if flags.world_size > 1 and sharded not in self.weights and replicas(flags) > 1:
            raise UserError(
                f"{self.name} cannot say that {weights_words}", field="weights", accepted="plan --for " + self.name
            )


def nodes_of(text: str) -> tuple[str, ...]:
    """The order of nodes that :meth:`RuntimeLaunch.heading` wrote; empty: none."""
    line = next((line for line in text.splitlines() if line.startswith(NODES)), "")
    return tuple(name.strip() for name in line.removeprefix(NODES).split(",") if name.strip())


def check_keys(keys: dict[str, Entry], table: KeyTable, where: str, section: str = "") -> None:
    """Refuse unknown keys and values that only another runtime has."""
    plain = {key: entry.plain() for key, entry in keys.items()}
    table.check_fixed(plain, where)
    if unknown := table.unknown(plain):
        raise UserError(
            f"unknown: {table.named(unknown)}", field=section or "key", where=where,
            accepted=", ".join(sorted(table.accepted_keys)),
        )  # fmt: skip
