"""DeepSpeed's JSON: data parallelism whose optimizer state (ZeRO stage 1) or weights (stage 3) are divided equally."""

from __future__ import annotations

import json
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.plans.runtimes.runtime import ForeignRuntime, GivenSizes, LoadedConfig, RuntimeLaunch, check_keys
from hetero_megatron.utils.foreign_keys import KeyTable, by_reason
from hetero_megatron.utils.yaml_document import Entry, parse_document

_OFF = (None, False)
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
KEYS = KeyTable(
    honoured=frozenset([*_SIZES, "zero_optimization", "bf16", "bfloat16", "fp16"]),
    fixed={"tensor_parallel": (None, {}), "pipeline": (None, {}), "sparse_attention": (None,), "amp": (None,)},
    harmless=by_reason({
        "of the optimizer, whose state is counted as the command's --optimizer": "optimizer scheduler",
        "it changes values, not times": (
            "gradient_clipping prescale_gradients gradient_predivide_factor communication_data_type"
            " sparse_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer data_types seed"
        ),
        "logs and files": (
            "steps_per_print wall_clock_breakdown memory_breakdown dump_state tensorboard wandb csv_monitor comet"
            " flops_profiler comms_logger checkpoint aio autotuning elasticity nebula data_efficiency"
            " disable_allgather dataloader_drop_last"
        ),
        "the model's code asks for it": "activation_checkpointing",
    }),
)  # fmt: skip
ZERO = KeyTable(
    honoured=frozenset(["stage"]),
    fixed={
        "offload_param": (None,), "offload_optimizer": (None,), "cpu_offload": _OFF, "cpu_offload_param": _OFF,
        "zero_hpz_partition_size": (1, None), "zero_quantized_weights": _OFF, "zero_quantized_gradients": _OFF,
        "zero_quantized_nontrainable_weights": _OFF, "zenflow": (None,), "mics_shard_size": (-1, None),
    },
    harmless=by_reason({
        "sizes of messages": (
            "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce"
            " allgather_partitions allgather_bucket_size overlap_comm sub_group_size stage3_prefetch_bucket_size"
            " stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters"
            " stage3_max_reuse_distance stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params"
            " stage3_allgather_sequential round_robin_gradients legacy_stage1"
        ),
        "checks, checkpoints and memory's details": (
            "load_from_fp32_weights elastic_checkpoint stage3_gather_16bit_weights_on_model_save compute_grad_norm"
            " stage3_gather_fp16_weights_on_model_save ignore_unused_parameters parameter_alignment"
            " memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings"
            " enable_sanity_checks leaf_module cpu_offload_use_pin_memory save_muon_momentum_buffer_in_memory"
        ),
    }),
)  # fmt: skip
_STAGES = {1: None, 3: True}


def write(launch: RuntimeLaunch) -> str:
    """JSON; DeepSpeed's launcher says how many ranks there are."""
    flags = launch.flags
    data: dict[str, Any] = {
        "train_batch_size": flags.global_batch_size,
        "train_micro_batch_size_per_gpu": flags.micro_batch_size,
        "gradient_accumulation_steps": launch.micro_batches,
        "zero_optimization": {"stage": 3 if flags.use_torch_fsdp2 else 1},
    }
    if launch.dtype != "fp32":
        data[launch.dtype] = {"enabled": True}
    return json.dumps(data, indent=2) + "\n"


def read(text: str, name: str, given: GivenSizes) -> LoadedConfig:
    """What the JSON says. Stages 0 and 2 are refused: optimizer state is divided here, gradients with the weights."""
    document = parse_document(text, name)
    keys = document.any_mapping()
    check_keys(keys, KEYS, name)
    zero = keys["zero_optimization"].any_mapping() if "zero_optimization" in keys else {}
    check_keys(zero, ZERO, name, "zero_optimization")
    stage = zero["stage"].integer(0, 3) if "stage" in zero else 0
    if stage not in _STAGES:
        raise UserError("no plan divides what it divides", field="zero_optimization.stage", value=stage,
                        accepted="1 (optimizer state) or 3 (weights)", where=name)  # fmt: skip
    batch, size, count = (_size(keys.get(key)) for key in _SIZES)
    # Of the three, two decide: batch = size x count x ranks.
    if size is None and batch is not None and count is not None:
        size = batch // (count * given.world_size)
    size = given.size("micro_batch_size", size, name)
    if batch is None and count is not None:
        batch = size * count * given.world_size
    batch = given.size("global_batch_size", batch, name)
    if count is not None and batch != size * count * given.world_size:
        sizes = f"micro-batch {size} x {count} steps x {given.world_size} ranks"
        raise UserError(f"is not {sizes}", field="train_batch_size", value=batch, where=name,
                        accepted=str(size * count * given.world_size))  # fmt: skip
    flags = MegatronParallel(
        given.world_size, given.size("seq_length", None, name), size, batch, use_torch_fsdp2=_STAGES[stage] is True,
    )
    return LoadedConfig(flags, _dtype(keys))


def _size(entry: Entry | None) -> int | None:
    """None where the file leaves it to Hugging Face's trainer."""
    return None if entry is None or entry.value in (None, "auto") else entry.integer(1)


def _dtype(keys: dict[str, Entry]) -> str | None:
    for key, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        section = keys[key].any_mapping() if key in keys else {}
        enabled = section.get("enabled")
        if enabled is not None and enabled.value == "auto":
            return None
        if enabled is not None and enabled.flag():
            return dtype
    return "fp32"


DEEPSPEED = ForeignRuntime(
    "deepspeed", tensor=False, pipeline=False, uneven=False, recompute=("none",), weights=(None, True),
    dtypes=("bf16", "fp16", "fp32"), write=write, read=read,
)  # fmt: skip
