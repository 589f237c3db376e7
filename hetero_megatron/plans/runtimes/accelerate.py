"""Accelerate's YAML for FSDP2: data parallelism whose weights are divided equally."""

from __future__ import annotations

from hetero_megatron.errors import UserError
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.plans.runtimes.runtime import ForeignRuntime, GivenSizes, LoadedConfig, RuntimeLaunch, check_keys
from hetero_megatron.utils.foreign_keys import KeyTable, by_reason
from hetero_megatron.utils.yaml_document import parse_document

_OFF = (None, False, "no")
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}
_NAMES = {dtype: name for name, dtype in _PRECISIONS.items()}
KEYS = KeyTable(
    honoured=frozenset(["num_processes", "mixed_precision", "fsdp_config", "distributed_type"]),
    fixed={
        "use_cpu": _OFF, "parallelism_config": (None, {}), "deepspeed_config": (None, {}), "tpu_use_cluster": _OFF,
        "megatron_lm_config": (None, {}), "fp8_config": (None, {}), "dynamo_config": (None, {}), "tpu_use_sudo": _OFF,
    },
    harmless=by_reason({
        "where processes are started": (
            "compute_environment machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend"
            " same_network main_training_function enable_cpu_affinity mpirun_config tpu_name tpu_zone tpu_env tpu_vm"
            " command_file commands"
        ),
        "logs": "debug",
        "of TPUs": "downcast_bf16",
    }),
)  # fmt: skip
FSDP = KeyTable(
    honoured=frozenset(["fsdp_version", "fsdp_reshard_after_forward", "fsdp_activation_checkpointing"]),
    fixed={
        "fsdp_offload_params": (False, None), "fsdp_sharding_strategy": (None, "FULL_SHARD", 1),
        "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", None), "fsdp_activation_checkpointing_offload": _OFF,
    },
    harmless=by_reason({
        "one layer is gathered at a time": (
            "fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_backward_prefetch fsdp_forward_prefetch"
        ),
        "how weights are read and written": (
            "fsdp_state_dict_type fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_use_orig_params"
        ),
    }),
)  # fmt: skip


def write(launch: RuntimeLaunch) -> str:
    """YAML; batch sizes are the training script's, and stand in the comments."""
    flags = launch.flags
    yes = {True: "true", False: "false"}
    lines = [
        f"# per_device_train_batch_size {flags.micro_batch_size}, gradient_accumulation_steps {launch.micro_batches},"
        f" sequences of {flags.seq_length} tokens",
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: FSDP",
        f"mixed_precision: '{_NAMES[launch.dtype]}'",
        f"num_processes: {flags.world_size}",
        f"num_machines: {len(launch.nodes) or 1}",
        "machine_rank: 0",
        "rdzv_backend: static",
        "main_training_function: main",
        "use_cpu: false",
        "fsdp_config:",
        "  fsdp_version: 2",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_reshard_after_forward: {yes[not flags.torch_fsdp2_no_reshard_after_forward]}",
        f"  fsdp_activation_checkpointing: {yes[flags.recompute_granularity == 'full']}",
        "  fsdp_offload_params: false",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
    ]
    return launch.heading() + "\n".join(lines) + "\n"


def read(text: str, name: str, given: GivenSizes) -> LoadedConfig:
    """What the YAML says of FSDP2. DDP is refused: there every rank has all optimizer state, which no plan has."""
    keys = parse_document(text, name).any_mapping()
    check_keys(keys, KEYS, name)
    keys.get("distributed_type", parse_document("FSDP", name)).choice(("FSDP",))
    fsdp = keys["fsdp_config"].any_mapping() if "fsdp_config" in keys else {}
    check_keys(fsdp, FSDP, name, "fsdp_config")
    version = fsdp["fsdp_version"].integer(1, 2) if "fsdp_version" in fsdp else 1
    if version != 2:
        raise UserError("FSDP of version 1 divides flat buffers", field="fsdp_config.fsdp_version", value=version,
                        accepted="2", where=name)  # fmt: skip
    precision = keys["mixed_precision"].choice(tuple(_PRECISIONS)) if "mixed_precision" in keys else "no"
    world = keys["num_processes"].integer(1) if "num_processes" in keys else given.world_size
    if world != given.world_size:
        raise UserError(f"the cluster has {given.world_size} ranks", field="num_processes", value=world,
                        accepted=str(given.world_size), where=name)  # fmt: skip
    reshard = fsdp["fsdp_reshard_after_forward"].flag() if "fsdp_reshard_after_forward" in fsdp else True
    recomputed = "fsdp_activation_checkpointing" in fsdp and fsdp["fsdp_activation_checkpointing"].flag()
    flags = MegatronParallel(
        world, given.size("seq_length", None, name), given.size("micro_batch_size", None, name),
        given.size("global_batch_size", None, name), use_torch_fsdp2=True,
        torch_fsdp2_no_reshard_after_forward=not reshard, recompute_granularity="full" if recomputed else None,
    )  # fmt: skip
    return LoadedConfig(flags, _PRECISIONS[precision])


ACCELERATE = ForeignRuntime(
    "accelerate", tensor=False, pipeline=False, uneven=False, recompute=("none", "full"), weights=(True, False),
    dtypes=("bf16", "fp16", "fp32"), write=write, read=read,
)  # fmt: skip
