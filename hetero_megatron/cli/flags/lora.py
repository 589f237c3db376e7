"""--lora-rank and the like of commands that plan and predict."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hetero_megatron.cli.numbers import SHARE, count
from hetero_megatron.errors import UserError
from hetero_megatron.plan.made_for import LORA_KEYS, MadeFor
from hetero_megatron.spec import Lora, ModelSpec, adapted
from hetero_megatron.spec.lora import BASE_DTYPES, EVERY_TARGET, MAX_RANK, all_linear


def add_lora(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--lora-rank", type=count(1, MAX_RANK), metavar="N",
        help="adapters of this rank are trained beside a frozen base")  # fmt: skip
    help = "projections with one (all linear layers)"
    add("--lora-targets", nargs="+", choices=EVERY_TARGET, metavar="NAME", help=help)
    add("--lora-dropout", type=SHARE, metavar="RATE", help="with which they drop elements of their inputs (0)")
    add("--use-dora", action="store_true", help="their rows are scaled to trained lengths (DoRA)")
    help = "in which the frozen projections are stored (the run's dtype)"
    add("--lora-base-dtype", choices=BASE_DTYPES, help=help)


def with_lora(args: Namespace, model: ModelSpec, made: MadeFor | None = None) -> ModelSpec:
    """The model with the adapters that the arguments ask for; what they leave open is as the plan ``made`` for it has
    it."""
    if made is not None and made.lora is not None:
        for name, key in LORA_KEYS.items():
            if getattr(args, key) is None or getattr(args, key) is False:
                setattr(args, key, getattr(made.lora, name))
    if args.lora_rank is None:
        for flag, given in (
            ("--lora-targets", args.lora_targets), ("--lora-dropout", args.lora_dropout),
            ("--lora-base-dtype", args.lora_base_dtype), ("--use-dora", args.use_dora or None),
        ):  # fmt: skip
            if given is not None:
                value = None if given is True else given
                raise UserError("has no effect without --lora-rank", field=flag, value=value)
        return model
    if args.lora_base_dtype is not None and args.fp8_format is not None:
        raise UserError(
            "--fp8-format knows no weights in 8 bits", field="--lora-base-dtype", value=args.lora_base_dtype,
            accepted="the command without --fp8-format",
        )  # fmt: skip
    try:
        targets, dropout = tuple(args.lora_targets or all_linear(model.gated)), args.lora_dropout or 0.0
        kind = {"dropout": dropout, "base_dtype": args.lora_base_dtype, "dora": args.use_dora}
        return adapted(model, Lora(args.lora_rank, float(args.lora_rank), targets, **kind))
    except UserError as error:
        name = f"--lora-{error.field}" if error.field in ("targets", "dropout") else "--lora-rank"
        name = "--use-dora" if error.field == "dora" else name
        raise UserError(error.problem, field=name, value=error.value, accepted=error.accepted) from None
