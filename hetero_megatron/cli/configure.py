"""A command line -> a TrainConfig. Nothing here or below imports torch, so refusals come at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hetero_megatron.cli import training_flags as training
from hetero_megatron.cli.model_flags import build_spec
from hetero_megatron.cli.parse import WHERE, Arguments, parse
from hetero_megatron.cli.plan_flags import build_plan
from hetero_megatron.data import DataConfig
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import TrainConfig

_SOURCES = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data")


def configure(argv: Sequence[str], environment: Mapping[str, str]) -> TrainConfig:
    """Parse, build and check everything that can be known before the ranks start.

    Raises:
        UserError: the first thing that cannot be honoured.
    """
    args = parse(argv)
    # What the command line alone decides comes before what needs files.
    optimizer, precision = training.build_optimizer(args), training.build_precision(args)
    evaluation, stop = training.build_evaluation(args), training.build_exit(args)
    logging, runtime = training.build_logging(args), training.build_runtime(args)
    data = _data(args)
    spec = build_spec(args, data)
    plan = build_plan(args, spec, environment)
    schedule = training.build_schedule(args, plan.global_batch_size)
    return TrainConfig(
        spec=spec,
        plan=plan,
        seed=_seed(args),
        schedule=schedule,
        optimizer=optimizer,
        precision=precision,
        evaluation=evaluation,
        exit=stop,
        logging=logging,
        runtime=runtime,
        data=data,
        dry_run=args["dry_run"],
        notices=tuple(dict.fromkeys(args.notices)),
    )


def _data(args: Arguments) -> DataConfig | None:
    """DataConfig's fields are flags of the same names; a flag that it does not know would be a bug."""
    if args["dry_run"] and not args.has(*_SOURCES):
        return None
    names = [f.name for f in dataclasses.fields(DataConfig)]
    return DataConfig(**{name: args[name] for name in names})


def _seed(args: Arguments) -> int:
    if args["seed"] < 0:
        raise UserError("is negative", field="--seed", value=args["seed"], accepted="0 or more", where=WHERE)
    return int(args["seed"])

