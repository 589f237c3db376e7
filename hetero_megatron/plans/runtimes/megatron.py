"""Megatron-LM's launch flags, one per line; the command line's own table reads them."""

from __future__ import annotations

from hetero_megatron.plans.runtimes.runtime import ForeignRuntime, RuntimeLaunch


def write(launch: RuntimeLaunch) -> str:
    """The flags of parallelism, sizes and dtype; data, model and training flags stay the launch script's."""
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
    weights=(None,), dtypes=("bf16", "fp16", "fp32"), write=write,
)  # fmt: skip
