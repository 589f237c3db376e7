"""Flags about training -> the frozen parts of a TrainConfig."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from hetero_megatron.cli.flags.parse import Arguments, flag_error, flag_name
from hetero_megatron.data import DataConfig
from hetero_megatron.plans import Plan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.kernels import OPERATORS, operator_problem
from hetero_megatron.plans.program import splits_backward
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.config import (
    AlignmentConfig,
    CheckpointConfig,
    DistributedConfig,
    ElasticConfig,
    EvaluationConfig,
    ExitConfig,
    FailureConfig,
    LoggingConfig,
    OptimizerConfig,
    ProfileSteps,
    ScheduleConfig,
)
from hetero_megatron.training.lr_schedule import BatchSize, LearningRate, LossScale, WeightDecay

if TYPE_CHECKING:
    from hetero_megatron.spec.muon import MuonRates

_BY_ITERATION = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_BY_SAMPLE = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def build_schedule(args: Arguments, global_batch_size: int) -> ScheduleConfig:
    """Length, batch size, learning rate and weight decay. Iterations and samples cannot be mixed, as in Megatron. While
    the batch grows, iterations count for the samples that they take.

    A dry run needs neither a length nor a learning rate.
    """
    by_sample = args["train_samples"] is not None
    if args["train_iters"] is None and not by_sample and not (args["dry_run"] or args["skip_train"]):
        accepted = "--train-iters or --train-samples" + (", or --epochs" if args["sft"] else "")
        raise flag_error("train_iters", None, "missing: how long to train", accepted)
    for key in _BY_ITERATION if by_sample else _BY_SAMPLE:
        if key in args.given:
            length_flag = "--train-samples" if by_sample else "--train-iters"
            counts = "samples" if by_sample else "iterations"
            raise flag_error(key, args[key], f"training with {length_flag} counts {counts}", "flags of one kind")
    ramp = args["rampup_batch_size"] or (0, 0, 0)
    if args["rampup_batch_size"] is not None and not any(ramp):
        raise flag_error("rampup_batch_size", "0 0 0", "a batch cannot start at 0", "START INCREMENT SAMPLES")
    batch = BatchSize(global_batch_size, *ramp)
    samples = args["train_samples"] if by_sample else batch.samples_after(args["train_iters"] or 0)
    length = batch.steps_for(samples)
    if by_sample and not length[0]:
        raise flag_error("train_samples", samples, "less than a step takes", f"{batch.at(0)} or more")
    rate = _learning_rate(args, samples, None if by_sample else batch)
    return ScheduleConfig(*length, batch, rate, _weight_decay(args, samples), args["train_samples"])


def _learning_rate(args: Arguments, train_samples: int, batch: BatchSize | None) -> LearningRate:
    """``batch``: of iterations, where flags count those; None: they count samples."""
    idle = args["dry_run"] or args["skip_train"] or args["save_scores"] is not None
    if args["lr"] is None:
        if not idle:
            raise flag_error("lr", None, "missing: the learning rate", "a number, e.g. 3e-4")
        return LearningRate(0.0, style="constant")
    kind = "samples" if batch is None else "iters"
    counts = [args[f"{key}_{kind}"] for key in ("lr_decay", "lr_warmup", "lr_wsd_decay")]
    decay, warmup, wsd = (n if n is None or batch is None else batch.samples_after(n) for n in counts)
    decay = train_samples if decay is None else decay
    if batch is not None and wsd is not None:  # the last steps of the decay, which are of full batches
        wsd = counts[2] * batch.final
    fraction = args["lr_warmup_fraction"]
    if fraction is not None:
        if warmup:
            raise flag_error("lr_warmup_fraction", fraction, f"it contradicts --lr-warmup-{kind}", "one of the two")
        warmup = fraction * decay
    elif warmup and args["lr_decay_style"] != "constant" and warmup >= decay:
        key = f"lr_warmup_{kind}"
        decay_steps = decay if batch is None else batch.steps_for(decay)[0]
        raise flag_error(key, args[key], "warm-up is as long as the whole decay", f"less than {decay_steps}")
    if idle and not decay:
        return LearningRate(args["lr"], style="constant")
    if args["lr_decay_style"] == "WSD" and wsd is None:
        raise flag_error(f"lr_wsd_decay_{kind}", None, "missing: WSD needs it", "an integer >= 1")
    return LearningRate(
        peak=args["lr"],
        minimum=args["min_lr"],
        initial=args["lr_warmup_init"],
        style=args["lr_decay_style"],
        warmup=warmup or 0,
        decay=decay,
        wsd_style=args["lr_wsd_decay_style"],
        wsd_decay=wsd or 0,
    )


def _weight_decay(args: Arguments, train_samples: int) -> WeightDecay:
    style = args["weight_decay_incr_style"]
    ends = ("start_weight_decay", "end_weight_decay")
    if style == "constant":
        for key in ends:
            if args[key] is not None:
                raise flag_error(
                    key, args[key], "weight decay is constant", "--weight-decay-incr-style linear or cosine"
                )
        return WeightDecay(args["weight_decay"], args["weight_decay"])
    for key in ends:
        if args[key] is None:
            raise flag_error(key, None, f"missing: weight decay grows ({style})", "a number")
    return WeightDecay(args["start_weight_decay"], args["end_weight_decay"], style, max(train_samples, 1))


def build_optimizer(args: Arguments) -> OptimizerConfig:
    return OptimizerConfig(
        args["optimizer"],
        args["adam_beta1"],
        args["adam_beta2"],
        args["adam_eps"],
        args["sgd_momentum"],
        args["clip_grad"],
        _build_muon(args) if args["optimizer"] == "muon" else None,
    )


def _build_muon(args: Arguments) -> MuonRates:
    from hetero_megatron.spec.muon import COEFFICIENTS, MuonRates

    mode, extra, steps = args["muon_scale_mode"], args["muon_extra_scale_factor"], args["muon_num_ns_steps"]
    sets = len(COEFFICIENTS[args["muon_coefficient_type"]])
    if steps % sets:
        raise flag_error(
            "muon_num_ns_steps", steps, f"{args['muon_coefficient_type']} coefficients are for {sets} steps",
            f"a multiple of {sets}, or --muon-coefficient-type simple",
        )  # fmt: skip
    if extra is None:
        extra = 0.2 if mode == "spectral" else 1.0
    return MuonRates(
        args["muon_momentum"], args["muon_nesterov"], steps, args["muon_coefficient_type"], mode, extra
    )


def build_precision(args: Arguments) -> str:
    """The dtype."""
    dtype_flags = [key for key in ("bf16", "fp16", "fp64") if args[key]]
    dtype = args["dtype"] or (dtype_flags[0] if dtype_flags else "fp32")
    for key in dtype_flags:
        if key != dtype:
            raise flag_error(key, True, f"it contradicts {dtype}", "one of --bf16, --fp16, --fp64, --dtype")
    return str(dtype)


def build_loss_scale(args: Arguments, dtype: str) -> LossScale:
    if dtype != "fp16":
        if args.has("loss_scale") and args["loss_scale"] != 1:
            raise flag_error("loss_scale", args["loss_scale"], f"{dtype} needs no loss scale", "1, or --fp16")
        return LossScale()
    if args["loss_scale"] is not None:
        return LossScale(args["loss_scale"])
    return LossScale(
        args["initial_loss_scale"], True, args["min_loss_scale"], args["loss_scale_window"], args["hysteresis"]
    )


def build_fp8(args: Arguments) -> Fp8 | None:
    """What --fp8-format and --fp8-recipe ask for; the recipe has no default that would be Megatron's."""
    if args["fp8_format"] is None:
        return None
    if args["fp8_recipe"] is None:
        raise flag_error(
            "fp8_recipe", None, "missing beside --fp8-format (Megatron's default, delayed, is not here)",
            "tensorwise or blockwise",
        )  # fmt: skip
    if args["compile"]:
        raise flag_error("compile", True, "compiled layers have no products in fp8", "leave one of the two out")
    return Fp8(args["fp8_format"], args["fp8_recipe"])


def build_evaluation(args: Arguments) -> EvaluationConfig:
    """Without --eval-interval (or with --eval-iters 0, as scripts write) nothing is evaluated."""
    if args["skip_train"] and not args["eval_iters"]:
        raise flag_error("skip_train", True, "with --eval-iters 0 there is nothing to do", "--eval-iters 1 or more")
    evaluates = args["eval_interval"] is not None or args["skip_train"]
    return EvaluationConfig(args["eval_iters"] if evaluates else 0, args["eval_interval"] or 1)


def build_exit(args: Arguments) -> ExitConfig:
    signal = args["exit_signal"] if args["exit_signal_handler"] else None
    return ExitConfig(args["exit_duration_in_mins"], args["exit_interval"], signal, args["exit_file"])


def exit_file_is_awaited(file: str | None) -> None:
    """Asked when a process starts, and not when a run goes on under another plan: then notice may have come."""
    if file is not None and os.path.lexists(file):
        raise flag_error("exit_file", file, "it exists: the run would stop after its first step",
                         "a path where nothing is before somebody tells the run to stop")  # fmt: skip


def build_logging(args: Arguments) -> LoggingConfig:
    names = {"wandb_project": "project", "wandb_entity": "entity", "wandb_exp_name": "name", "wandb_save_dir": "dir"}
    wandb = {name: args[key] for key, name in names.items() if args[key] is not None}
    names = {"mlflow_experiment": "experiment", "mlflow_run_name": "run_name", "mlflow_tracking_uri": "tracking_uri"}
    mlflow = {name: args[key] for key, name in names.items() if args[key] is not None}
    return LoggingConfig(
        args["log_interval"],
        args["save"],
        args["tensorboard_dir"],
        args["tensorboard_queue_size"],
        args["tensorboard_log_interval"],
        args["log_validation_ppl_to_tensorboard"],
        wandb if "project" in wandb else None,
        args["log_kernel_plan"],
        args["log_format"],
        _profile(args),
        _routing_stats(args),
        mlflow if "experiment" in mlflow else None,
        (args["memory_snapshot_path"] or "snapshot.pickle") if args["record_memory_history"] else None,
    )


def _routing_stats(args: Arguments) -> str | None:
    path: str | None = args["routing_stats"]
    if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
        raise flag_error("routing_stats", path, "its directory is not there", "a file in a directory that exists")
    return path


def _profile(args: Arguments) -> ProfileSteps | None:
    if not args["profile"]:
        return None
    start, end = args["profile_step_start"], args["profile_step_end"]
    if end <= start:
        raise flag_error("profile_step_end", end, "no step is profiled", f"above --profile-step-start {start}")
    return ProfileSteps(start, end, tuple(args["profile_ranks"]) if args["use_pytorch_profiler"] else ())


def build_alignment(args: Arguments) -> AlignmentConfig:
    for op in args["check_operators"] or ():
        problem = operator_problem(op)
        if problem is not None:
            raise flag_error("check_operators", op, problem, ", ".join(("all", *OPERATORS)))
    check = args["check_operators"]
    return AlignmentConfig(
        args["dump_layers"], args["capture_operators"], None if check is None else tuple(check),
        tuple(args["align_layers"] or ()), args["align_steps"],
    )  # fmt: skip


def build_distributed(args: Arguments) -> DistributedConfig:
    if args["tp_sums_in_16_bits"] and not args["bf16"] and not args["fp16"]:
        args.notices.append("--tp-sums-in-16-bits: nothing is in 16 bits here (--bf16 and --fp16 are)")
    return DistributedConfig(
        args["distributed_backend"], args["distributed_timeout_minutes"], args["transport"],
        args["overlap_param_gather"], args["tp_sums_in_16_bits"],
    )  # fmt: skip


_OVERRIDE, _USE = "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"


def build_checkpoint(args: Arguments) -> CheckpointConfig:
    adapters = args["lora_rank"] is not None or args["load_adapter"] is not None
    if args["load"] is not None and args["load_hf"] is not None and not adapters:
        args.notices.append("--load-hf only counts if --load holds no checkpoint")
    if args[_OVERRIDE] and args[_USE]:
        raise flag_error(_USE, True, "it contradicts --override-opt_param-scheduler", "one of the two")
    return CheckpointConfig(
        save=args["save"],
        overwrite=args["overwrite_checkpoints"],
        save_interval=args["save_interval"],
        keep=args["keep_checkpoints"],
        retain_interval=args["save_retain_interval"],
        save_optim=not args["no_save_optim"],
        asynchronous=not args["sync_save"],
        load=args["load"],
        step=args["ckpt_step"],
        finetune=args["finetune"],
        pretrained=args["pretrained_checkpoint"],
        load_optim=not args["no_load_optim"],
        previous_on_corruption=args["load_previous_on_corruption"],
        required=args["exit_on_missing_checkpoint"],
        schedule_from="flags" if args[_OVERRIDE] else "checkpoint" if args[_USE] else "same",
    )


def build_failure(args: Arguments, supervised: bool) -> FailureConfig:
    """``supervised``: ``hetero-megatron run`` started this process, or is about to."""
    drift, key = args["replan_on_drift"], "replan_on_drift"
    if drift is not None:
        if not supervised:
            raise flag_error(key, drift, "nobody is here to plan again", "hetero-megatron run ... -- these flags")
        needed = ("cluster",) if args["elastic"] else ("cluster", "save", "load")  # its ranks keep their state
        missing = [flag_name(k) for k in needed if args[k] is None]
        if missing or args["save_interval"] == 0 and not args["elastic"]:
            problem = f"it needs {' and '.join(missing)}" if missing else "it needs checkpoints"
            accepted = ", ".join(map(flag_name, needed)) + ("" if args["elastic"] else ", without --save-interval 0")
            raise flag_error(key, drift, problem, accepted)
    rerun = args["rerun_mode"] == "validate_results"
    return FailureConfig(
        args["check_for_spiky_loss"], rerun, args["log_straggler"], drift,
        check_kernels=not args["no_kernel_check"],
        replica_interval=args["check_weight_hash_across_dp_replicas_interval"],
    )  # fmt: skip


def build_elastic(args: Arguments, data: DataConfig | None, supervised: bool) -> ElasticConfig | None:
    """What cannot be left and taken up again inside a process is refused by name."""
    if not args["elastic"]:
        return None
    if not supervised and not args["dry_run"]:
        raise flag_error("elastic", True, "nobody is here to say who is left",
                         "torchrun, with --elastic on the command line; or hetero-megatron run --elastic ... -- these "
                         "flags")  # fmt: skip
    replica_interval = args["peer_replicas_every"] or None
    goes_on = args["save"] is not None and args["save"] == args["load"]
    if replica_interval is None and not goes_on:
        raise flag_error("peer_replicas_every", 0, "with --elastic what a lost rank owns would be lost with it",
                         "1 or more, or --save DIR and --load DIR, the same")  # fmt: skip
    if args["save"] is not None and (not goes_on or args["finetune"]):
        raise flag_error("elastic", True, "each epoch writes to --save, and must go on from what is there",
                         "--load DIR, the same as --save, without --finetune")  # fmt: skip
    if data is not None and data.reads_stream:
        problem = "a data set that is read as a stream has one reader on each node, which may be lost"
        raise flag_error("elastic", True, problem, "another --dataloader-type than streaming, or --mock-data")
    once = ("profile", "wandb_project", "mlflow_experiment", "dump_layers", "capture_operators",
            "record_memory_history")
    for key in (*once, "skip_train"):
        if args[key]:
            raise flag_error(key, args[key], "it belongs to one run of the processes, and --elastic makes several",
                             "without it, or without --elastic")  # fmt: skip
    if args["exit_signal_handler"]:
        raise flag_error("exit_signal_handler", True, "with --elastic SIGTERM to a rank makes that rank leave",
                         "SIGTERM or Ctrl-C to hetero-megatron run, by which all stop")  # fmt: skip
    return ElasticConfig(replica_interval)


def build_graphs(
    args: Arguments, plan: Plan, spec: ModelSpec, data: DataConfig | None
) -> int | None:
    """Steps after which layers run as graphs; None: they never do."""
    if args["cuda_graph_impl"] == "transformer_engine":
        args.notices.append(
            "--cuda-graph-impl transformer_engine: Transformer Engine captures nothing here (local captures layers)"
        )
    if args["cuda_graph_impl"] != "local":
        return None
    scope = args["cuda_graph_scope"] or ["full"]
    if list(scope) != ["full"]:
        raise flag_error("cuda_graph_scope", " ".join(scope), "whole layers are captured, no parts of them", "full")
    problem = next(chain(_in_run(args, data), _in_plan(plan, spec)), None)
    if problem is not None:
        raise flag_error("cuda_graph_impl", "local", problem, "none")
    return int(args["cuda_graph_warmup_steps"])


def _in_run(args: Arguments, data: DataConfig | None) -> Iterator[str]:
    """What is not the same for every micro-batch, or is not computed by the launches alone."""
    if args["compile"]:
        yield "layers that torch.compile has changed (--compile) cannot be captured"
    if data is not None and (data.sft or data.reset_position_ids or data.reset_attention_mask):
        yield "documents and positions are others in every sample (--sft, --reset-position-ids, --reset-attention-mask)"
    if args["rampup_batch_size"] is not None:
        yield "micro-batches are not all of one size (--rampup-batch-size)"
    if args.has("dump_layers", "capture_operators", "check_operators"):
        yield "what a graph computes cannot be watched (precision alignment)"


def _in_plan(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    if spec.moe is not None:
        yield "how many rows an expert has is known when it runs"
    if splits_backward(plan):
        yield f"the {plan.schedule} schedule puts off weight gradients"
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            stage_name = f"pipelines[{p}].stages[{s}]"
            if len({unit.sequences for unit in stage.units}) < len(stage.units):
                yield f"layers of {stage_name} communicate: it has context groups"
            if stage.optimizer.offload:
                yield f"the optimizer of {stage_name} is in host memory"
