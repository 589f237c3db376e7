"""Flags about adapters -> a model with them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from hetero_megatron.cli.arguments import SHARE, count
from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.errors import UserError
from hetero_megatron.plans.made_for import LORA_KEYS, MadeFor
from hetero_megatron.spec import Lora, ModelSpec, adapted
from hetero_megatron.spec.lora import BASE_DTYPES, EVERY_TARGET, MAX_RANK, all_linear
from hetero_megatron.training.config import AdapterConfig

_FLAGS = {
    "rank": "lora_rank", "alpha": "lora_alpha", "targets": "lora_targets", "rslora": "use_rslora", "dora": "use_dora",
}  # fmt: skip
_DROPOUT, _BASE = "lora_dropout", "lora_base_dtype"


def with_adapters(args: Arguments, spec: ModelSpec) -> ModelSpec:
    """The model with the adapters of --load-adapter or --lora-rank, if any.

    Raises:
        UserError: flags contradict each other, or adapters do not fit the model.
    """
    if args["lora_rank"] is None and args["load_adapter"] is None:
        return spec
    _check(args)
    found = _loaded(args, spec) if args["load_adapter"] is not None else _new(args, spec)
    assert found.lora is not None
    lora = replace(found.lora, base_dtype=args[_BASE])
    try:
        found = adapted(found.base, lora)
    except UserError as error:  # all but the dtype is known to fit
        raise flag_error(_BASE, error.value, error.problem, error.accepted) from None
    for key in ("fp8_format", "compile"):
        if found.in_few_bits and args[key]:
            name = f"--{key.replace('_', '-')}"
            raise flag_error(_BASE, args[_BASE], f"{name} knows no weights in so few bits", f"the run without {name}")
    if args["compile"] and lora.dropout:
        raise flag_error(
            _DROPOUT, lora.dropout, "masks are others in every step, which a compiled layer cannot have",
            "0, or no --compile",
        )  # fmt: skip
    return found


def _new(args: Arguments, spec: ModelSpec) -> ModelSpec:
    alpha = args["lora_alpha"] if args["lora_alpha"] is not None else float(args["lora_rank"])
    try:
        targets = tuple(args["lora_targets"] or all_linear(spec.gated))
        dropout, dora = args[_DROPOUT] or 0.0, args["use_dora"]
        return adapted(spec, Lora(args["lora_rank"], alpha, targets, args["use_rslora"], dropout, dora=dora))
    except UserError as error:
        key = (_FLAGS | {"dropout": _DROPOUT})[error.field]
        raise flag_error(key, error.value, error.problem, error.accepted) from None


def _loaded(args: Arguments, spec: ModelSpec) -> ModelSpec:
    from hetero_megatron.checkpoint.adapter_config import read_config  # imports torch

    lora = read_config(args["load_adapter"], "--load-adapter", spec)
    if lora.residual is not None and args["load_hf"] is None:
        problem = f"adapters of {lora.residual} count beside what they began with, taken out of the base's weights"
        raise flag_error("load_adapter", args["load_adapter"], problem, "--load-hf with their base")
    for name, key in _FLAGS.items():
        said = tuple(args[key]) if key == "lora_targets" and args[key] else args[key]
        if key in args.given and said != getattr(lora, name):
            raise flag_error(key, args[key], f"the adapter says {getattr(lora, name)}", "leave the flag out")
    try:
        if args[_DROPOUT] is not None:  # a setting of the run, where all others are the adapter's
            lora = replace(lora, dropout=args[_DROPOUT])
        return adapted(spec, lora)
    except UserError as error:
        if error.field == "dropout":
            raise flag_error(_DROPOUT, error.value, error.problem, error.accepted) from None
        raise flag_error("load_adapter", args["load_adapter"], f"{error.value}: {error.problem}") from None


def _check(args: Arguments) -> None:
    if args["save_hf"] is not None and not args["merge_lora"]:
        raise flag_error(
            "save_hf", args["save_hf"], "adapters are no Hugging Face model",
            "--save-adapter DIR, or --merge-lora to write the base with the adapters merged into it",
        )  # fmt: skip
    for key in ("finetune", "pretrained_checkpoint"):
        if args[key]:
            raise flag_error(key, args[key], "adapters have their base from a Hugging Face directory",
                             "--load-hf (hetero-megatron convert makes a directory of a checkpoint)")  # fmt: skip


def build_adapter(args: Arguments) -> AdapterConfig:
    return AdapterConfig(args["load_adapter"], args["save_adapter"], args["merge_lora"])


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
            "--fp8-format knows no weights in so few bits", field="--lora-base-dtype", value=args.lora_base_dtype,
            accepted="the command without --fp8-format",
        )  # fmt: skip
    try:
        targets, dropout = tuple(args.lora_targets or all_linear(model.gated)), args.lora_dropout or 0.0
        kind = {"dropout": dropout, "base_dtype": args.lora_base_dtype, "dora": args.use_dora}
        return adapted(model, Lora(args.lora_rank, float(args.lora_rank), targets, **kind))
    except UserError as error:
        named = {"targets": "--lora-targets", "dropout": "--lora-dropout", "base_dtype": "--lora-base-dtype"}
        name = named.get(error.field, "--lora-rank")
        name = "--use-dora" if error.field == "dora" else name
        raise UserError(error.problem, field=name, value=error.value, accepted=error.accepted) from None
