"""The runtimes, by name; and Megatron-LM, whose launch flags the command line's own table reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.runtimes.accelerate import ACCELERATE
from hetero_megatron.plans.runtimes.deepspeed import DEEPSPEED
from hetero_megatron.plans.runtimes.degrees import degrees_of, node_order, rank_order, renumbered
from hetero_megatron.plans.runtimes.runtime import ForeignRuntime, RuntimeLaunch
from hetero_megatron.plans.runtimes.torchtitan import TORCHTITAN

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec


def megatron_flags(launch: RuntimeLaunch) -> str:
    """Megatron-LM's flags of parallelism, sizes and dtype, one per line; data, model and training flags stay the launch
    script's."""
    flags = launch.flags
    lines = [
        f"--tensor-model-parallel-size {flags.tensor_model_parallel_size}",
        f"--pipeline-model-parallel-size {flags.pipeline_model_parallel_size}",
    ]
    if flags.tensor_model_parallel_size > 1:
        lines.append("--sequence-parallel")
    if flags.pipeline_model_parallel_layout is not None:
        lines.append(f"--pipeline-model-parallel-layout '{flags.pipeline_model_parallel_layout}'")
    lines += [
        f"--micro-batch-size {flags.micro_batch_size}",
        f"--global-batch-size {flags.global_batch_size}",
        f"--seq-length {flags.seq_length}",
        "--use-distributed-optimizer",
    ]
    for name in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
        if getattr(flags, name) is not None:
            lines.append(f"--{name.replace('_', '-')} {getattr(flags, name)}")
    lines += [f"--{launch.dtype}"] if launch.dtype in ("bf16", "fp16") else []
    return launch.heading() + "\n".join(lines) + "\n"


MEGATRON = ForeignRuntime(
    "megatron", tensor=True, pipeline=True, uneven=True, recompute=("none", "selective", "full", "first"),
    weights=(None,), dtypes=("bf16", "fp16", "fp32"), write=megatron_flags,
)  # fmt: skip


RUNTIMES = {runtime.name: runtime for runtime in (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE)}


def written(name: str, plan: Plan, spec: ModelSpec, cluster: Cluster, dtype: str) -> str:
    """The plan as the runtime's file.

    Raises:
        UserError: names what the runtime cannot say.
    """
    flags = degrees_of(plan, spec, name)
    RUNTIMES[name].check(flags, dtype)
    order = rank_order(plan, flags, spec)
    nodes = node_order(order, cluster, name)
    counts = {sum(cluster.ranks[rank].node == node for rank in order) for node in nodes}
    launch = RuntimeLaunch(flags, dtype, spec.num_layers, nodes, counts.pop() if len(counts) == 1 else 0)
    return RUNTIMES[name].write(launch)


def reordered(plan: Plan, nodes: Sequence[str], cluster: Cluster) -> Plan:
    """A plan whose ranks are numbered through these nodes, with the cluster's numbers; no nodes: as it is."""
    order = [rank.rank for name in nodes for rank in cluster.ranks if rank.node == name]
    return renumbered(plan, order) if order else plan
