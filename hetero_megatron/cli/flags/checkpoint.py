"""Flags about checkpoints and failures -> CheckpointConfig, FailureConfig."""

from __future__ import annotations

from hetero_megatron.cli.flags.parse import Arguments, flag_error, flag_name
from hetero_megatron.training.config import CheckpointConfig, FailureConfig

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
        missing = [flag_name(k) for k in ("cluster", "save", "load") if args[k] is None]
        if missing or args["save_interval"] == 0:
            what = f"it needs {' and '.join(missing)}" if missing else "it needs checkpoints"
            raise flag_error(key, drift, what, "--cluster, --save and --load, without --save-interval 0")
    rerun = args["rerun_mode"] == "validate_results"
    return FailureConfig(
        args["check_for_spiky_loss"], rerun, args["log_straggler"], drift,
        check_kernels=not args["no_kernel_check"],
        replica_interval=args["check_weight_hash_across_dp_replicas_interval"],
    )  # fmt: skip
