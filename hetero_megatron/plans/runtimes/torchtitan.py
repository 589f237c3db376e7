"""torchtitan's TOML: tensor and pipeline parallelism, and FSDP2 over the data-parallel ranks.

Versions from 0.3 on take the same keys as flags instead (``--parallelism.tensor_parallel_degree 2``), the modules of a
stage with commas between them, recomputation as a word of its own at the end (``activation_checkpoint:full``), and call
the head ``lm_head``; the first comment of what is written says those.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.plans.runtimes.degrees import layout
from hetero_megatron.plans.runtimes.runtime import ForeignRuntime, GivenSizes, LoadedConfig, RuntimeLaunch, check_keys
from hetero_megatron.utils.foreign_keys import KeyTable, by_reason
from hetero_megatron.utils.yaml_document import Entry, from_data

_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_OFF = (None, False)
_DEGREES = (
    "data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree pipeline_parallel_degree"
    " module_fqns_per_model_part pipeline_parallel_split_points pipeline_parallel_layers_per_stage"
    " pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers"
    " pipeline_parallel_microbatch_size data_parallel_replicate_degree"
)
SECTIONS = KeyTable(
    honoured=frozenset(["training", "parallelism", "activation_checkpoint"]),
    fixed={"float8": (None, {}), "quantize": (None, {}), "mx": (None, {})},
    harmless=by_reason({
        "it divides nothing": (
            "job profiling metrics model optimizer lr_scheduler checkpoint compile comm memory_estimation"
            " fault_tolerance experimental validation debug"
        )
    }),
)  # fmt: skip
TRAINING = KeyTable(
    honoured=frozenset(["local_batch_size", "global_batch_size", "seq_len", "dtype", "mixed_precision_param"]),
    fixed={"enable_cpu_offload": _OFF, "mixed_precision_reduce": ("float32",)},
    harmless=by_reason({
        "data, steps and seeds": "dataset dataset_path max_norm steps compile gc_freq gc_debug seed deterministic"
        " deterministic_warn_only debug_moe_force_load_balance disable_cuda_graphs",
    }),
)  # fmt: skip
PARALLELISM = KeyTable(
    honoured=frozenset(_DEGREES.split()),
    fixed={
        "context_parallel_degree": (1,), "expert_parallel_degree": (1,), "expert_tensor_parallel_degree": (1,),
        "pipeline_parallel_schedule": ("1F1B",), "pipeline_parallel_schedule_csv": ("", None),
    },
    harmless=by_reason({
        "how collectives are compiled": "enable_async_tensor_parallel enable_compiled_autograd spmd_backend"
        " enable_fsdp_symm_mem disable_loss_parallel enable_sequence_parallel",
        "of context and expert parallelism": "context_parallel_rotate_method context_parallel_load_balancer"
        " context_parallel_ptrr_mask_key pipeline_parallel_expert_parallel_overlap expert_parallel_comm_backend",
    }),
)  # fmt: skip
RECOMPUTE = KeyTable(
    honoured=frozenset(["mode"]),
    fixed={},
    harmless=by_reason({
        "of selective recomputation, and checks": "selective_ac_option memory_budget visualize_memory_budget_pareto"
        " per_op_sac_force_recompute_mm_shapes_by_fqns early_stop preserve_rng_state determinism_check debug",
    }),
)  # fmt: skip


def write(launch: RuntimeLaunch) -> str:
    """TOML of the sections that say sizes and degrees."""
    flags = launch.flags
    stages, size = flags.pipeline_model_parallel_size, flags.micro_batch_size
    reshard = "never" if flags.torch_fsdp2_no_reshard_after_forward else "always"
    model_parts = _parts(launch.layers, "output") if stages > 1 else None
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": launch.replicas,
        "fsdp_reshard_after_forward": reshard, "tensor_parallel_degree": flags.tensor_model_parallel_size,
        "pipeline_parallel_degree": stages,
    }  # fmt: skip
    if model_parts is not None:
        parallelism |= {
            "pipeline_parallel_schedule": "1F1B", "pipeline_parallel_microbatch_size": size,
            "module_fqns_per_model_part": model_parts,
        }  # fmt: skip
    data: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": size * launch.micro_batches if stages > 1 else size,
            "global_batch_size": flags.global_batch_size, "seq_len": flags.seq_length,
            "mixed_precision_param": next(name for name, dtype in _DTYPES.items() if dtype == launch.dtype),
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": "full" if flags.recompute_granularity == "full" else "none"},
    }  # fmt: skip
    words = [f"--{section}.{key} {_word(value)}" for section in ("training", "parallelism")
             for key, value in data[section].items()]  # fmt: skip
    if stages > 1:
        words.append("--training.disable_cuda_graphs")  # which 0.3 has no pipelines with
    words.append(f"activation_checkpoint:{data['activation_checkpoint']['mode']}")
    newer = " ".join(words)
    lines = [f"# from 0.3 on as flags: {newer}"]
    for section, values in data.items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return launch.heading() + "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return " ".join(",".join("lm_head" if name == "output" else name for name in names) for names in value)


def _parts(layers: list[int], head: str) -> list[list[str]]:
    """Names of the modules of each stage."""
    names, start = [], 0
    for count in layers:
        names.append([f"layers.{i}" for i in range(start, start + count)])
        start += count
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", head]
    return names


def read(text: str, name: str, given: GivenSizes) -> LoadedConfig:
    """What the TOML says. Replicated weights are refused: there every rank has all optimizer state."""
    try:
        document = from_data(tomllib.loads(text), "", name)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"is no TOML: {error}", field="--from", where=name) from None
    sections = document.any_mapping()
    check_keys(sections, SECTIONS, name)
    training, parallel, recompute = (
        sections[key].any_mapping() if key in sections else {}
        for key in ("training", "parallelism", "activation_checkpoint")
    )
    for keys, table, section in (
        (training, TRAINING, "training"), (parallel, PARALLELISM, "parallelism"),
        (recompute, RECOMPUTE, "activation_checkpoint"),
    ):  # fmt: skip
        check_keys(keys, table, name, section)

    def degree(key: str, default: int = 1) -> int:
        return parallel[key].integer(1) if key in parallel else default

    tp, pp = degree("tensor_parallel_degree"), degree("pipeline_parallel_degree")
    dp, remainder = divmod(given.world_size, tp * pp)
    if remainder:
        problem = f"{given.world_size} ranks are no multiple of {tp} x {pp}"
        raise UserError(problem, field="parallelism.tensor_parallel_degree", value=tp, where=name,
                        accepted="degrees that divide the ranks")  # fmt: skip
    _check_replicas(parallel, dp, name)
    local = training["local_batch_size"].integer(1) if "local_batch_size" in training else 8
    size = degree("pipeline_parallel_microbatch_size") if pp > 1 else local
    batch = training["global_batch_size"].integer(-1) if "global_batch_size" in training else -1
    batch = given.size("global_batch_size", batch if batch > 0 else local * dp, name)
    if local % size or batch % (local * dp):
        raise UserError("does not divide", field="training.local_batch_size", value=local, where=name,
                        accepted=f"a multiple of {size} of which {dp} replicas divide {batch}")  # fmt: skip
    mode = recompute["mode"].choice(("none", "full")) if "mode" in recompute else None
    if mode is None:
        raise UserError("missing: by default it is selective, which no plan has", where=name,
                        field="activation_checkpoint.mode", accepted="none, full")  # fmt: skip
    reshard = parallel["fsdp_reshard_after_forward"].choice(("default", "always", "never")) \
        if "fsdp_reshard_after_forward" in parallel else "default"  # fmt: skip
    stays_whole = reshard == "never" or (reshard == "default" and pp > 1)
    flags = MegatronParallel(
        given.world_size, training["seq_len"].integer(1) if "seq_len" in training else 2048, size, batch, tp, pp,
        pipeline_model_parallel_layout=_layout(parallel, pp, given.num_layers, name),
        recompute_granularity="full" if mode == "full" else None,
        use_torch_fsdp2=dp > 1, torch_fsdp2_no_reshard_after_forward=dp > 1 and stays_whole,
    )  # fmt: skip
    return LoadedConfig(flags, _dtype(training))


def _check_replicas(parallel: dict[str, Entry], dp: int, name: str) -> None:
    copies = parallel.get("data_parallel_replicate_degree")
    if copies is not None and copies.integer(1) != 1:
        copies.fail("every rank of these has all optimizer state, which no plan has", "1")
    shard = parallel.get("data_parallel_shard_degree")
    if shard is not None and shard.integer(-1) not in (-1, dp):
        problem = f"the other degrees leave {dp} ranks"
        raise UserError(problem, field=shard.path, value=shard.value, accepted=f"{dp} or -1", where=name)


def _dtype(training: dict[str, Entry]) -> str:
    names = [training[key].choice(tuple(_DTYPES)) for key in ("dtype", "mixed_precision_param") if key in training]
    return _DTYPES[names[-1] if names else "bfloat16"]


def _layout(parallel: dict[str, Entry], pp: int, layers: int, name: str) -> str | None:
    """The stages as Megatron writes them."""
    if pp == 1:
        return None
    if "module_fqns_per_model_part" in parallel:
        counts = _listed(parallel["module_fqns_per_model_part"], layers)
    elif "pipeline_parallel_split_points" in parallel and parallel["pipeline_parallel_split_points"].value:
        counts = _split(parallel["pipeline_parallel_split_points"], layers)
    else:
        counts = _even(parallel, pp, layers)
    if len(counts) != pp:
        raise UserError(f"{len(counts)} stages for {pp} ranks: 1F1B has one each", where=name,
                        field="parallelism.pipeline_parallel_degree", value=pp, accepted=str(len(counts)))  # fmt: skip
    return layout(counts)


def _listed(entry: Entry, layers: int) -> list[int]:
    """Layers of each list of modules, which have to be those of a decoder in order."""
    name_lists = [[item.text() for item in names.items()] for names in entry.items()]
    counts = [sum(name.startswith("layers.") for name in names) for names in name_lists]
    possible = [_parts(counts, head) for head in ("output", "lm_head")]
    if sum(counts) != layers or not any(
        sorted(map(sorted, name_lists)) == sorted(map(sorted, lists)) for lists in possible
    ):
        accepted = f"tok_embeddings, layers.0 to layers.{layers - 1} in order, norm, output"
        raise UserError("no stages of this model", field=entry.path, accepted=accepted, where=entry.where)
    return counts


def _split(entry: Entry, layers: int) -> list[int]:
    """Layers between the first layers of the stages after the first."""
    starts = [0]
    for item in entry.items():
        match = re.fullmatch(r"layers\.(\d{1,6})", item.text())
        if match is None or not starts[-1] < int(match[1]) < layers:
            item.fail("starts no stage here", "layers.N, ascending")
        starts.append(int(match[1]))
    return [b - a for a, b in zip(starts, [*starts[1:], layers], strict=True)]


def _even(parallel: dict[str, Entry], pp: int, layers: int) -> list[int]:
    """As torchtitan divides where nothing is said: embedding and head are layers, the first stages get more."""
    first, last = (
        parallel[key].integer(0) if key in parallel else 1
        for key in ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
    )
    total = layers + first + last
    if "pipeline_parallel_layers_per_stage" in parallel:
        stages = -(-total // parallel["pipeline_parallel_layers_per_stage"].integer(1))
        if stages != pp:
            parallel["pipeline_parallel_layers_per_stage"].fail(f"makes {stages} stages of {pp} ranks", "one each")
    per_stage, remainder = divmod(total, pp)
    counts = [per_stage + (stage < remainder) for stage in range(pp)]
    counts[0] -= first
    counts[-1] -= last
    if min(counts) < 0:
        raise UserError("leaves a stage without room", field="parallelism.pipeline_parallel_degree", value=pp)
    return counts


TORCHTITAN = ForeignRuntime(
    "torchtitan", tensor=True, pipeline=True, uneven=True, recompute=("none", "full"), weights=(True, False),
    dtypes=("bf16", "fp32"), write=write, read=read,
)  # fmt: skip
