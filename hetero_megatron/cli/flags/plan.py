"""From --plan, Megatron's parallel flags, or FlagScale's meshes to a Plan."""

from __future__ import annotations

import math
import sys

from hetero_megatron.cli.flags.parse import WHERE, Arguments, flag_error, flag_name
from hetero_megatron.cluster import Cluster
from hetero_megatron.environment.launcher import LauncherEnvironment
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, all_ranks, load_plan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.islands import add_islands, format_added
from hetero_megatron.plans.made_for import MadeFor, as_flags, lora_words, read_made_for
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.text import plural
from hetero_megatron.utils.yaml_document import Entry, read_document

_FSDP = ("use_torch_fsdp2", "torch_fsdp2_no_reshard_after_forward", "use_megatron_fsdp")
_OFFLOAD = (
    "fine_grained_activation_offloading", "offload_modules", "fine_grained_offloading_max_inflight_offloads",
    "cpu_offloading_num_layers", "cpu_offloading",
)  # fmt: skip
_UNIFORM = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "cp_comm_type",
    "hierarchical_context_parallel_sizes", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_activations", "recompute_modules",
    "use_tp_pp_dp_mapping", "schedule", *_FSDP, *_OFFLOAD,
)  # fmt: skip
_LISTS = (
    "recompute_granularity_per_stage_micro_batch", "recompute_method_per_stage_micro_batch",
    "recompute_num_layers_per_stage_micro_batch",
)  # fmt: skip
_MESHES = (
    "hetero_process_meshes", "hetero_pipeline_layer_split", "hetero_device_types", "hetero_current_device_type",
    *_LISTS,
)  # fmt: skip
_WITH_MESHES = (
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "use_tp_pp_dp_mapping",
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_activations", "recompute_modules",
    "hierarchical_context_parallel_sizes", *_FSDP, *_OFFLOAD,
)  # fmt: skip

MAX_RANKS = 1 << 16


def build_plan(
    args: Arguments,
    spec: ModelSpec,
    launcher: LauncherEnvironment,
    cluster: Cluster | None = None,
    dtype: str | None = None,
    fp8: Fp8 | None = None,
) -> Plan:
    """The plan that the flags ask for, valid for the model and for the ranks that were started.

    Args:
        launcher: says how many ranks there are.
        cluster: a plan file is also checked against it, with the ``dtype`` that its chips must have.
        fp8: what linear modules may compute in; --auto-plan says where.

    Raises:
        UserError: contradictory flags, a plan that breaks a law, or one for another number of ranks.
    """
    if args["auto_plan"]:
        return _searched(args, spec, launcher, cluster, dtype, fp8)
    if args["plan"] is not None:
        return _from_file(args, spec, launcher, cluster, dtype)
    for key in ("seq_length", "micro_batch_size"):
        if args[key] is None:
            raise flag_error(key, None, "missing, and there is no --plan", "an integer >= 1, or --plan FILE")
    if args.has(*_MESHES):
        plan = _from_meshes(args, spec, launcher)
    else:
        from hetero_megatron.plans.importers.megatron import from_megatron
        from hetero_megatron.plans.importers.megatron_stages import MegatronParallel

        uniform_flags = {key: args[key] for key in _UNIFORM if args[key] is not None}
        plan = from_megatron(
            MegatronParallel(
                world_size=_ranks(args, launcher, 0),
                seq_length=args["seq_length"],
                micro_batch_size=args["micro_batch_size"],
                global_batch_size=args["global_batch_size"],
                data_parallel_sharding_strategy=args["data_parallel_sharding_strategy"],
                **uniform_flags,
            ),
            spec,
        )
    return plan


def _from_file(
    args: Arguments, spec: ModelSpec, launcher: LauncherEnvironment, cluster: Cluster | None, dtype: str | None
) -> Plan:
    document = read_document(args["plan"])
    section = document.section("made_for")
    if section is not None:  # first: what else does not fit another model would be a riddle
        made_for = read_made_for(section)
        made_for.agree_on_model(made_for.with_predictions(spec) if args.generates else spec, args["plan"])
    plan = load_plan(document, spec, cluster, dtype, _role_models(args, document, spec))
    if cluster is not None and (with_islands := add_islands(plan, spec, cluster)) is not plan:
        plan = with_islands
        args.notices.append(format_added(plan, cluster))
    for key, plan_value in (("seq_length", plan.seq_length), ("global_batch_size", plan.global_batch_size)):
        if key in args.given and args[key] != plan_value:
            raise flag_error(key, args[key], f"the plan file says {plan_value}", f"{plan_value}, or leave the flag out")
    _ranks(args, launcher, all_ranks(plan)[-1] + 1)
    return plan


def _role_models(args: Arguments, document: Entry, spec: ModelSpec) -> dict[str, ModelSpec]:
    """The models of the roles of a plan file, as far as flags say."""
    if document.section("roles") is None:
        return {}
    from hetero_megatron.cli.flags.role_models import role_models

    return role_models(args, spec)


def take_defaults(args: Arguments) -> None:
    """Apply the ``made_for`` settings of a plan file; flags that contradict them are refused."""
    if args["plan"] is None or args["auto_plan"]:
        return
    for key in (*_UNIFORM, *_MESHES, "micro_batch_size"):
        if key in args.given:
            raise flag_error(key, args[key], "the plan file says this already", "one of the two")
    section = read_document(args["plan"]).section("made_for")
    if section is None:
        return
    made_for = read_made_for(section)
    dtype_flags = [(flag_name(key), key) for key in ("bf16", "fp16", "fp64") if args[key]]
    dtype_flags += [("--dtype", args["dtype"])] if args["dtype"] is not None else []
    for name, dtype in dtype_flags:
        made_for.agree("dtype", name, dtype, args["plan"])
    if not dtype_flags:
        args.values["dtype"] = made_for.dtype
        args.notices.append(f"dtype {made_for.dtype}: the plan was made for it")
    if made_for.fp8 is not None:
        given_fp8 = args["fp8_format"] is not None and args["fp8_recipe"] is not None
        if given_fp8:
            made_for.agree_on_fp8(Fp8(args["fp8_format"], args["fp8_recipe"]), args["plan"])
        elif args["fp8_format"] is None and args["fp8_recipe"] is None:
            args.values |= {"fp8_format": made_for.fp8.format, "fp8_recipe": made_for.fp8.recipe}
            args.notices.append(f"{made_for.fp8}: the plan was made for it")
    if "optimizer" in args.given:
        made_for.agree("optimizer", "--optimizer", args["optimizer"], args["plan"])
    elif args["optimizer"] != made_for.optimizer:
        args.values["optimizer"] = made_for.optimizer
        args.notices.append(f"optimizer {made_for.optimizer}: the plan was made for it")
    if made_for.known_model() is not None and not args.has("model", "load_hf", "num_layers", "hidden_size"):
        args.values["model"] = made_for.model
        args.notices.append(f"model {made_for.model}: the plan was made for it")
    if made_for.mtp_layers and "mtp_num_layers" not in args.given and not args.generates:
        args.values["mtp_num_layers"] = made_for.mtp_layers
        args.notices.append(f"--mtp-num-layers {made_for.mtp_layers}: the plan was made with it")
    _take_adapters(args, made_for)


def _take_adapters(args: Arguments, made_for: MadeFor) -> None:
    """Adapters as the plan has them, where flags and --load-adapter do not say otherwise; what they say is compared
    with the plan when the model is known."""
    if made_for.lora is None or args["load_adapter"] is not None:
        return
    places = [key for key in ("lora_targets", "lora_layers", "lora_sites") if key in args.given]
    for key, value in as_flags(made_for.lora, places).items():
        if key not in args.given:
            args.values[key] = value
    if "lora_rank" not in args.given:
        args.notices.append(f"{' '.join(lora_words(made_for.lora))}: the plan was made with it")


def _searched(
    args: Arguments, spec: ModelSpec, launcher: LauncherEnvironment, cluster: Cluster | None, dtype: str | None,
    fp8: Fp8 | None,
) -> Plan:  # fmt: skip
    """--auto-plan: every rank searches and finds the same plan, because the search is deterministic."""
    from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace, TimeBudget
    from hetero_megatron.planner.search.driver import search
    from hetero_megatron.plans.memory.of_plan import moments_of
    from hetero_megatron.predictor.cost.cost_options import CostOptions

    for key in (*_UNIFORM, *_MESHES, "plan"):
        if key in args.given:
            raise flag_error(key, args[key], "--auto-plan decides this", "one of the two")
    if cluster is None:
        raise flag_error("auto_plan", True, "it needs the cluster to plan for", "--cluster FILE beside it")
    for key in ("seq_length", "global_batch_size"):
        if args[key] is None:
            raise flag_error(key, None, "missing beside --auto-plan", "an integer >= 1")
    sizes = (args["micro_batch_size"],) if "micro_batch_size" in args.given else None
    costs = CostOptions(
        moments=moments_of(args["optimizer"]), muon=args["optimizer"] == "muon", fp8=fp8,
        gradient_bytes=2.0 if args["grad_reduce_in_bf16"] else None, gather_ahead=args["overlap_param_gather"],
    )  # fmt: skip
    fixed = args["compile"] or args["cuda_graph_impl"] == "local"  # neither goes with activations in host memory
    space = SearchSpace(micro_batch_sizes=sizes, offload_activations="never" if fixed else "auto")
    options = SearchOptions(dtype=dtype or "fp32", space=space, costs=costs)
    if launcher.rank == 0:
        chips = plural(cluster.world_size, "chip")
        activity = f"searching for a plan on {chips}; hetero-megatron plan would show how that goes"
        print(activity, file=sys.stderr, flush=True)
    budget = TimeBudget().uncaught()  # of two ranks that Ctrl-C stops each would have its own best so far
    optimum = search(
        PlanningProblem(spec, cluster, args["seq_length"], args["global_batch_size"], options), budget=budget
    ).best
    _ranks(args, launcher, optimum.plan.ranks[-1] + 1)
    args.notices.append(
        f"plan {optimum.plan.fingerprint()} searched: {optimum.step_seconds:.4g} s per step predicted, "
        f"{optimum.prediction.tokens_per_second:,.0f} tokens/s"
    )
    return optimum.plan


def _from_meshes(args: Arguments, spec: ModelSpec, launcher: LauncherEnvironment) -> Plan:
    from hetero_megatron.plans.importers.flagscale import FlagScaleParallel, from_flagscale

    for key in _WITH_MESHES:
        if key in args.given:
            raise flag_error(key, args[key], "it contradicts --hetero-process-meshes", "one of the two")
    for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if args[key] not in (None, 1):
            raise flag_error(key, args[key], "experts on unlike meshes are divided by a plan file (docs/moe.md)", "1")
    for key in ("hetero_process_meshes", "hetero_pipeline_layer_split"):
        if args[key] is None:
            raise flag_error(key, None, "missing beside the other --hetero flags", "one or more integers")
    numbers = args["hetero_process_meshes"]
    total = sum(tp * cp * dp * pp for tp, cp, _, dp, pp in zip(*[iter(numbers)] * 5))
    plan = from_flagscale(
        FlagScaleParallel(
            seq_length=args["seq_length"],
            hetero_process_meshes=numbers,
            hetero_pipeline_layer_split=args["hetero_pipeline_layer_split"],
            hetero_device_types=args["hetero_device_types"] or (),
            micro_batch_size=args["micro_batch_size"],
            global_batch_size=args["global_batch_size"],
            world_size=_ranks(args, launcher, total) if total > 0 and len(numbers) % 5 == 0 else None,
            schedule=args["schedule"] or "1f1b",
            cp_comm_type=args["cp_comm_type"] or ("p2p",),
            **{key: args[key] for key in _LISTS},
        ),
        spec,
    )
    # FlagScale's launch lines repeat the sizes of Megatron's flags; what they say must agree with the meshes.
    contexts = sorted(set(numbers[1::5]))
    if args.has("context_parallel_size") and args["context_parallel_size"] not in contexts:
        accepted = " or ".join(map(str, contexts)) + ", or leave the flag out"
        raise flag_error("context_parallel_size", args["context_parallel_size"], "no mesh has it", accepted)
    stages, degrees = len(plan.pipelines[0].stages), sorted(set(numbers[::5]))
    if args.has("tensor_model_parallel_size") and args["tensor_model_parallel_size"] not in degrees:
        value = args["tensor_model_parallel_size"]
        accepted = " or ".join(map(str, degrees)) + ", or leave the flag out"
        raise flag_error("tensor_model_parallel_size", value, "no mesh has it", accepted)
    if args.has("pipeline_model_parallel_size") and args["pipeline_model_parallel_size"] != stages:
        value = args["pipeline_model_parallel_size"]
        problem = f"the meshes have {plural(stages, 'stage')}"
        raise flag_error("pipeline_model_parallel_size", value, problem, str(stages))
    _check_chip(args, plan, launcher)
    return plan


def _check_chip(args: Arguments, plan: Plan, launcher: LauncherEnvironment) -> None:
    """--hetero-current-device-type: the chip of the mesh that this rank is in."""
    chip, types = args["hetero_current_device_type"], args["hetero_device_types"]
    if chip is None:
        return
    rank = launcher.rank if launcher.numbered else None
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    mesh_chip = next((stage.chip for stage in stages if rank in stage.ranks), None)
    if chip not in types or (mesh_chip is not None and chip != mesh_chip):
        problem = f"rank {rank} is in a mesh of {mesh_chip}" if chip in types and mesh_chip else "no mesh has this chip"
        raise flag_error("hetero_current_device_type", chip, problem, mesh_chip or ", ".join(types))


def _ranks(args: Arguments, launcher: LauncherEnvironment, needed: int) -> int:
    """Number of ranks: torchrun's, or in a dry run --world-size, else ``needed`` (the plan's minimum; 0: any)."""
    if args["world_size"] is not None:
        count, source = int(args["world_size"]), "--world-size"
    else:
        count, source = launcher.world_size, "WORLD_SIZE"
        sizes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        if args["dry_run"] and (needed or not launcher.counted):
            count, source = needed or math.prod(int(args[size]) for size in sizes), "number of ranks"
    if not 1 <= count <= MAX_RANKS:
        raise UserError("is no number of ranks", field=source, value=count, accepted=f"1 to {MAX_RANKS}", where=WHERE)
    if count < needed:
        field = "--plan" if args["plan"] is not None else "--hetero-process-meshes"
        field = "--auto-plan" if args["auto_plan"] else field
        problem = f"it needs {plural(needed, 'rank')} and {count} {'was' if count == 1 else 'were'} started ({source})"
        raise UserError(
            problem, field=field, value=args["plan"] or args["hetero_process_meshes"],
            accepted=f"torchrun --nproc-per-node with {plural(needed, 'rank')} in all", where="command line",
        )  # fmt: skip
    return count
