"""From a command line to a RunConfig. Does not import torch, so errors come immediately.

The words are parsed by ``cli/flags/parse.py`` by the table of flags; each builder here or in ``cli/flags/`` turns some
values into one part of the configuration, and the errors of all parts are raised together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_megatron.cli.early import check_data, check_early, check_offload
from hetero_megatron.cli.flags import training as training
from hetero_megatron.cli.flags.adapter import with_adapters
from hetero_megatron.cli.flags.expert_flags import BALANCING_FLAGS, build_balancing
from hetero_megatron.cli.flags.model import build_dropout, build_spec, with_predictions
from hetero_megatron.cli.flags.parse import (
    Arguments,
    Collector,
    check_use,
    flag_error,
    flag_name,
    parse_all,
)
from hetero_megatron.cli.flags.plan import build_plan, take_defaults
from hetero_megatron.cli.flags.training import build_checkpoint, build_elastic, build_failure, build_graphs
from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.data import DataConfig, build_datasets, reads_text, refuse_bytes
from hetero_megatron.data.config import choose_type
from hetero_megatron.environment.launcher import LauncherEnvironment, read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.fp8_checks import fp8_fits
from hetero_megatron.plans.kernels import with_kernels
from hetero_megatron.plans.program import splits_backward
from hetero_megatron.spec import ModelSpec, model_folder
from hetero_megatron.spec.moe import Balancing
from hetero_megatron.spec.preference import Preference
from hetero_megatron.training.config import AdapterConfig, OptimizerConfig, RunConfig
from hetero_megatron.utils.text import plural, rank_ranges


def take_epochs(
    args: Arguments, data: DataConfig | None, seq_length: int, global_batch_size: int, rows: int
) -> None:
    """Put the steps of ``--epochs`` in the place of ``--train-iters``, rounded up; packs of conversations are counted
    for that, so all of them are encoded (large data sets are cached, and encoded once).

    Args:
        rows: of the model's embedding.

    Raises:
        UserError: another length is given, or the data have no end that is known.
    """
    epochs = args["epochs"]
    if epochs is None:
        return
    for length_key in ("train_iters", "train_samples"):
        if args[length_key] is not None:
            raise flag_error(length_key, args[length_key], "two lengths: --epochs is one, too", "one of them")
    if data is None:  # a dry run
        return
    if data.reads_stream:
        raise flag_error("epochs", epochs, "a stream has no known length", "--train-iters or --train-samples")
    from hetero_megatron.data.chat.packed import PackedConversations

    dataset = build_datasets(data, seq_length, args["seed"], (1, 0, 0), rows, log=lambda _: None).train
    if not isinstance(dataset, PackedConversations):
        problem = "a blend of several data sets has no epochs: each has its own"
        raise flag_error("epochs", epochs, problem, "--train-iters or --train-samples, or one data set")
    steps = math.ceil(round(epochs * dataset.num_packs / global_batch_size, 6))
    args.values["train_iters"] = max(1, steps)
    args.notices.append(
        f"--epochs {epochs:g}: {plural(dataset.num_packs, 'sample')} each, {plural(args['train_iters'], 'step')}"
    )


TOKENIZER = ("tokenizer.*", "tokenizer_config.json", "vocab.*", "spiece.model")  # files that hold one, or name it
_SOURCES = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data")


def configure(
    argv: Sequence[str], environment: Mapping[str, str], model: ModelSpec | None = None, early: bool = False,
    generates: bool = False,
) -> RunConfig:  # fmt: skip
    """Parse the flags and check everything that can be known before the ranks start.

    Args:
        environment: the launcher's, which gives the ranks.
        model: that of a checkpoint, where flags name none.
        generates: nothing is trained.
        early: also look at places, packages and data, as the first rank of a run does (see ``early``).

    Raises:
        UserError: all errors in one; but what cannot be judged because of another is not.
    """
    args, errors = parse_all(argv)
    args.generates = generates
    config = configure_arguments(args, errors, environment, model, early)
    if config.elastic is None:
        return config
    from hetero_megatron.cli.peer_copies import with_room_for_copies

    return with_room_for_copies(config, args.has("peer_replicas_every"))


def configure_arguments(
    args: Arguments, errors: list[UserError], environment: Mapping[str, str], model: ModelSpec | None = None,
    early: bool = False,
) -> RunConfig:  # fmt: skip
    """The configuration from a command line that is parsed already; ``errors``: what was found wrong with it then."""
    faults = Collector(errors, args.places)
    collect, launcher = faults.part, faults.part(lambda: read_launcher(environment, joins=False))
    collect(take_defaults, args)
    optimizer, evaluation = collect(training.build_optimizer, args), collect(training.build_evaluation, args)
    dtype = collect(training.build_precision, args)
    loss_scale = collect(training.build_loss_scale, args, dtype)
    fp8, dropout = collect(training.build_fp8, args), collect(build_dropout, args)
    stop, logging = collect(training.build_exit, args), collect(training.build_logging, args)
    distributed, data = collect(training.build_distributed, args), collect(_data, args)
    collect(_find_model, args)
    data = collect(_own_tokenizer, args, data)
    collect(_set_dtype, args, dtype)
    collect(check_use, args, data)
    spec = collect(lambda: with_predictions(args, model)) if model is not None else collect(_spec, args, data)
    collect(_check_vocabulary, args, data, spec)
    cluster = collect(_cluster, args)
    plan = collect(_plan, args, spec, launcher, cluster, dtype, fp8)
    collect(_dtypes_fit, plan, spec, fp8, dtype, cluster)
    collect(_muon_fits, optimizer, plan, spec)
    balancing = collect(_balancing, args, spec, plan)
    if early:
        check_early(args, faults)
        collect(check_offload, plan)
        collect(lambda data, evaluation: check_data(data, evaluation, not args["skip_train"], faults), data, evaluation)
    collect(
        lambda data, plan, spec: take_epochs(args, data, plan.seq_length, plan.global_batch_size, spec.vocab_size),
        data, plan, spec,
    )  # fmt: skip
    schedule = collect(lambda plan: training.build_schedule(args, plan.global_batch_size), plan)
    checkpoint = collect(build_checkpoint, args)
    failure = collect(lambda launcher: build_failure(args, launcher.supervised), launcher)
    elastic = collect(lambda data, launcher: build_elastic(args, data, launcher.supervised), data, launcher)
    preference = collect(_preference, args, spec, balancing)
    teacher_fields = collect(_beside, args, spec, plan, cluster, data, preference, balancing)
    collect(_outer_fits, plan, preference)
    collect(_predictions_fit, args, spec, preference, fp8)
    alignment, compiled = collect(training.build_alignment, args), collect(_compile, args, plan)
    graphs, as_rank = collect(build_graphs, args, plan, spec, data), collect(_as_rank, args, plan)
    collect(_stages_fit, plan, compiled, graphs, fp8)
    faults.done()
    return RunConfig(
        spec=spec,
        plan=plan,
        balancing=balancing,
        data=data,
        schedule=schedule,
        cluster=cluster,
        seed=args["seed"],
        elastic=elastic,
        dtype=dtype,
        fp8=fp8,
        loss_scale=loss_scale,
        dropout=dropout,
        optimizer=optimizer, evaluation=evaluation, exit=stop,
        checkpoint=checkpoint,
        adapter=AdapterConfig(args["load_adapter"], args["save_adapter"], args["merge_lora"]),
        failure=failure, logging=logging,
        distributed=distributed,
        check_nan=not args["no_check_for_nan_in_loss_and_grad"],
        reduce_in_bf16=args["grad_reduce_in_bf16"],
        deterministic=args["deterministic_mode"],
        logits_bytes=int(args["max_logits_mib"]) << 20,
        alignment=alignment,
        platform=args["platform"],
        compile=compiled, graphs_after=graphs,
        skip_train=args["skip_train"],
        load_hf=args["load_hf"],
        model_directory=model_folder(args["model"]),
        save_hf=args["save_hf"],
        save_hf_dtype=args["save_hf_dtype"],
        dry_run=args["dry_run"], as_rank=as_rank,
        allow_over_memory=args["allow_over_memory"],
        notices=args.all_notices(),
        preference=preference, reference_logps=args["reference_logps"], reference_hf=args["reference_hf"],
        **(teacher_fields if isinstance(teacher_fields, dict) else {}),  # what could not be built is not used either
    )


def _find_model(args: Arguments) -> None:
    if args["load_hf"] is not None:
        from hetero_megatron.checkpoint.model_files import model_directory

        args.values["load_hf"] = model_directory(args["load_hf"], "--load-hf")


def _dtypes_fit(plan: Plan, spec: ModelSpec, fp8: Fp8 | None, dtype: str, cluster: Cluster | None) -> None:
    if fp8 is not None or plan.dtypes:
        fp8_fits(plan, spec, fp8, dtype, cluster)


def _muon_fits(optimizer: OptimizerConfig, plan: Plan, spec: ModelSpec) -> None:
    if optimizer.muon is not None:
        from hetero_megatron.plans.matrices import check_muon

        check_muon(plan, spec)


def _balancing(args: Arguments, spec: ModelSpec, plan: Plan) -> Balancing:
    if spec.moe is None and not args.has(*BALANCING_FLAGS):
        return Balancing()
    return build_balancing(args, spec, plan)


def _set_dtype(args: Arguments, dtype: str) -> None:
    args.values["dtype"] = dtype


def _spec(args: Arguments, data: DataConfig | None) -> ModelSpec:
    spec = build_spec(args, data)
    has_adapters = args["lora_rank"] is not None or args["load_adapter"] is not None
    return with_adapters(args, spec) if has_adapters else spec


def _plan(
    args: Arguments, spec: ModelSpec, launcher: LauncherEnvironment, cluster: Cluster | None, dtype: str,
    fp8: Fp8 | None,
) -> Plan:  # fmt: skip
    plan = build_plan(args, spec, launcher, cluster, dtype, fp8)
    return plan if args["kernels"] is None else with_kernels(plan, args["kernels"])


def _data(args: Arguments) -> DataConfig | None:
    """DataConfig's fields are flags of the same names."""
    files = {key: args[key] for key in ("tokenizer_model", "vocab_file", "merge_file")}
    source = "--tokenizer-type" if args["tokenizer_type"] else ", ".join(flag_name(k) for k, v in files.items() if v)
    args.values["tokenizer_type"] = choose_type(
        args["tokenizer_type"], args["tokenizer_model"], args["vocab_file"], args["merge_file"]
    )
    if args["dry_run"] and not args.has(*_SOURCES):
        return None
    values = {f.name: args[f.name] for f in dataclasses.fields(DataConfig) if f.name != "tokenizer_source"}
    return DataConfig(**values, tokenizer_source=source)


def _own_tokenizer(args: Arguments, data: DataConfig | None) -> DataConfig | None:
    """Text for a model from a directory is tokenized with the model's own tokenizer (of --load-hf, else of --model),
    unless flags name another."""
    if data is None or not reads_text(data) or args.has("tokenizer_type", "tokenizer_model", "vocab_file"):
        return data
    directories = {"--load-hf": args["load_hf"], "--model": model_folder(args["model"])}
    for flag, directory in directories.items():
        if directory is not None and any(any(Path(directory).glob(name)) for name in TOKENIZER):
            source = f"of {flag}"
            args.notices.append(f"text is read with the tokenizer {source} {directory} (--tokenizer-type: another one)")
            args.values["tokenizer_type"] = kind = "HuggingFaceTokenizer"
            return dataclasses.replace(
                data, tokenizer_type=kind, tokenizer_model=directory, tokenizer_source=source
            )
    if (directory := args["load_hf"]) is not None:
        args.notices.append(f"--load-hf {directory} holds no tokenizer: text is read byte by byte (--tokenizer-type)")
    return data


def _check_vocabulary(args: Arguments, data: DataConfig | None, spec: ModelSpec) -> None:
    """Beside --model, --vocab-size counts the ids of a NullTokenizer; for others it has to be the model's."""
    if data is None:
        return
    refuse_bytes(data, spec.vocab_size)
    model_key = next((key for key in ("model", "load_hf") if args[key] is not None), None)
    null = data.tokenizer_type == "NullTokenizer" or (data.tokenizer_type is None and not reads_text(data))
    size = args["vocab_size"]
    if model_key is not None and size is not None and not null and size != spec.vocab_size:
        problem = f"{flag_name(model_key)} {args[model_key]} says {spec.vocab_size}"
        raise flag_error("vocab_size", size, problem, "leave the flag out")


def _preference(args: Arguments, spec: ModelSpec, balancing: Balancing) -> Preference | None:
    if args["preference"] is None:
        return None
    from hetero_megatron.cli.flags.preference import build_preference

    return build_preference(args, spec, balancing)


def _beside(
    args: Arguments, spec: ModelSpec, plan: Plan, cluster: Cluster | None, data: DataConfig | None,
    preference: Preference | None, balancing: Balancing,
) -> dict[str, Any]:  # fmt: skip
    """Of a run with a teacher, with a reference on ranks of its own, that scores data or samples answers, those fields
    of its configuration."""
    role_fields: dict[str, Any] = {}
    if args["grpo"]:
        from hetero_megatron.cli.flags.grpo import build_grpo

        grpo, generator = build_grpo(args, spec, plan, balancing)
        return {"grpo": grpo, **({"role": generator} if generator is not None else {})}
    if preference is not None and plan.roles:
        from hetero_megatron.cli.flags.preference import build_reference

        role_fields["role"] = build_reference(args, spec, plan, preference, data)
    if not args.has("teacher_hf", "teacher_scores", "save_scores"):
        return role_fields
    from hetero_megatron.cli.flags.role_models import build_scores, build_teacher

    distillation, role = build_teacher(args, spec, plan, cluster, data)
    return role_fields | {
        "distillation": distillation, **({"role": role} if role is not None else {}), "teacher_hf": args["teacher_hf"],
        "teacher_scores": args["teacher_scores"], "scores": build_scores(args, spec),
    }  # fmt: skip


def _predictions_fit(args: Arguments, spec: ModelSpec, preference: Preference | None, fp8: Fp8 | None) -> None:
    """Refuse what knows no modules that predict further tokens."""
    if not spec.mtp_layers:
        return
    refused = (
        (preference is not None, "--preference", "it compares whole answers"),
        (fp8 is not None, "--fp8-format", "a last stage that has no layers of its own computes nothing in fp8"),
        (args["cuda_graph_impl"] == "local", "--cuda-graph-impl", "modules are no layers that are captured"),
    )
    for is_set, flag, reason in refused:
        if is_set:
            accepted = f"0, or no {flag}"
            raise flag_error("mtp_num_layers", spec.mtp_layers, f"not known beside {flag}: {reason}", accepted)


def _outer_fits(plan: Plan, preference: Preference | None) -> None:
    if plan.outer is not None and preference is not None:
        raise UserError("there are no outer steps beside it", field="--preference", accepted="a plan without outer")


def _cluster(args: Arguments) -> Cluster | None:
    if args["cluster"] is None:
        return None
    return load_cluster(args["cluster"])


def _as_rank(args: Arguments, plan: Plan) -> int | None:
    rank: int | None = args["as_rank"]
    if rank is not None and rank not in plan.ranks:
        problem = "no rank of the plan trains there"
        raise flag_error("as_rank", rank, problem, rank_ranges(plan.ranks))
    return rank


def _stages_fit(plan: Plan, compiled: str | None, graphs: int | None, fp8: Fp8 | None) -> None:
    if any(stage.weights is not None or stage.activations is not None for stage in plan.stages):
        from hetero_megatron.training.runtime_options import RuntimeOptions, stages_fit

        stages_fit(RuntimeOptions(compiled, graphs_after=graphs, fp8=fp8), plan)


def _compile(args: Arguments, plan: Plan) -> str | None:
    if args["compile"] and splits_backward(plan):
        problem = f"a compiled layer cannot put off its weight gradients, as the {plan.schedule} schedule does"
        raise flag_error("compile", True, problem, "leave the flag out, or another schedule")
    if args["compile"] and any(stage.recompute.kind == "elementwise" for stage in plan.stages):
        problem = "a compiled layer keeps what its compiler chooses, so its elementwise results cannot be recomputed"
        raise flag_error("compile", True, problem, "leave the flag out, or recompute: none, selective or full")
    return str(args["compile_backend"]) if args["compile"] else None
