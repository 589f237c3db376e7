"""A command line -> a RunConfig. Nothing here or below imports torch, so refusals come at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_megatron.cli import training_flags as training
from hetero_megatron.cli.checkpoint_flags import build_checkpoint, build_failure
from hetero_megatron.cli.hub import model_directory
from hetero_megatron.cli.model_flags import build_spec
from hetero_megatron.cli.parse import WHERE, Arguments, flag_error, parse
from hetero_megatron.cli.plan_flags import build_plan, take_defaults
from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.data import DataConfig, reads_text
from hetero_megatron.errors import UserError
from hetero_megatron.plan import Plan
from hetero_megatron.plan.kernels import with_kernels
from hetero_megatron.training.config import RunConfig

TOKENIZER = ("tokenizer.*", "tokenizer_config.json", "vocab.*", "spiece.model")  # files that hold one, or name it
_SOURCES = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data")


def configure(argv: Sequence[str], environment: Mapping[str, str]) -> RunConfig:
    """Parse, build and check everything that can be known before the ranks start.

    Args:
        environment: WORLD_SIZE is read from it.

    Raises:
        UserError: the first thing that cannot be honoured.
    """
    args = parse(argv)
    take_defaults(args)
    # What the command line alone decides comes before what needs files.
    optimizer, evaluation = training.build_optimizer(args), training.build_evaluation(args)
    dtype, loss_scale = training.build_precision(args)
    stop, logging = training.build_exit(args), training.build_logging(args)
    distributed, seed = training.build_distributed(args), _seed(args)
    data = _data(args)
    if args["load_hf"] is not None:
        args.values["load_hf"] = model_directory(args["load_hf"], "--load-hf")
        data = _own_tokenizer(args, data)
    spec = build_spec(args, data)
    cluster = _cluster(args)
    plan = build_plan(args, spec, environment, cluster, dtype)
    if args["kernels"] is not None:
        plan = with_kernels(plan, args["kernels"])
    return RunConfig(
        spec=spec,
        plan=plan,
        data=data,
        schedule=training.build_schedule(args, plan.global_batch_size),
        cluster=cluster,
        seed=seed,
        dtype=dtype,
        loss_scale=loss_scale,
        optimizer=optimizer,
        evaluation=evaluation,
        exit=stop,
        checkpoint=build_checkpoint(args),
        failure=build_failure(args, environment),
        logging=logging,
        distributed=distributed,
        check_nan=not args["no_check_for_nan_in_loss_and_grad"],
        deterministic=args["deterministic_mode"],
        logits_bytes=_logits_bytes(args),
        alignment=training.build_alignment(args),
        platform=args["platform"],
        compile=_compile(args),
        skip_train=args["skip_train"],
        load_hf=args["load_hf"],
        save_hf=args["save_hf"],
        save_hf_dtype=args["save_hf_dtype"] or dtype,
        dry_run=args["dry_run"],
        as_rank=_as_rank(args, plan),
        allow_over_memory=args["allow_over_memory"],
        notices=tuple(dict.fromkeys(args.notices)),
    )


def _data(args: Arguments) -> DataConfig | None:
    """DataConfig's fields are flags of the same names."""
    if args["dry_run"] and not args.has(*_SOURCES):
        return None
    return DataConfig(**{f.name: args[f.name] for f in dataclasses.fields(DataConfig)})


def _own_tokenizer(args: Arguments, data: DataConfig | None) -> DataConfig | None:
    """Text for weights that were trained elsewhere is read with their own tokenizer, unless flags name another."""
    if data is None or not reads_text(data) or args.has("tokenizer_type", "tokenizer_model", "vocab_file"):
        return data
    directory = Path(args["load_hf"])
    if not any(any(directory.glob(name)) for name in TOKENIZER):
        args.notices.append(f"--load-hf {directory} holds no tokenizer: text is read byte by byte (--tokenizer-type)")
        return data
    args.notices.append(f"text is read with the tokenizer of --load-hf {directory} (--tokenizer-type: another one)")
    return dataclasses.replace(data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(directory))


def _cluster(args: Arguments) -> Cluster | None:
    if args["cluster"] is None:
        return None
    if args["plan"] is None and not args["auto_plan"]:
        raise flag_error("cluster", args["cluster"], "it needs a plan", "--plan FILE or --auto-plan beside it")
    return load_cluster(args["cluster"])


def _as_rank(args: Arguments, plan: Plan) -> int | None:
    rank: int | None = args["as_rank"]
    if rank is not None and not args["dry_run"]:
        raise flag_error("as_rank", rank, "it needs --dry-run", "--dry-run --as-rank R")
    if rank is not None and rank not in plan.ranks:
        raise flag_error("as_rank", rank, "the plan has no such rank", f"0 to {plan.ranks[-1]}")
    return rank


def _compile(args: Arguments) -> str | None:
    if "compile_backend" in args.given and not args["compile"]:
        raise flag_error("compile_backend", args["compile_backend"], "it needs --compile")
    return str(args["compile_backend"]) if args["compile"] else None


def _seed(args: Arguments) -> int:
    if args["seed"] < 0:
        raise UserError("is negative", field="--seed", value=args["seed"], accepted="0 or more", where=WHERE)
    return int(args["seed"])


def _logits_bytes(args: Arguments) -> int:
    if args["max_logits_mib"] < 1:
        raise flag_error("max_logits_mib", args["max_logits_mib"], "too small", "an integer >= 1")
    return int(args["max_logits_mib"]) << 20
