"""Flags about adapters -> a model with them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from hetero_megatron.cli.arguments import SHARE, count
from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.errors import UserError
from hetero_megatron.plans.made_for import MadeFor, as_flags
from hetero_megatron.spec import Lora, ModelSpec, adapted
from hetero_megatron.spec.lora import BASE_DTYPES, MAX_RANK, SITE_WORD, all_linear

_FLAGS = {
    "rank": "lora_rank", "alpha": "lora_alpha", "targets": "lora_targets", "rslora": "use_rslora", "dora": "use_dora",
    "layers": "lora_layers", "sites": "lora_sites",
}  # fmt: skip
_PLACES = ("lora_targets", "lora_layers", "lora_sites")
_DROPOUT, _BASE = "lora_dropout", "lora_base_dtype"


def with_adapters(args: Arguments, spec: ModelSpec) -> ModelSpec:
    """The model with the adapters of --load-adapter or --lora-rank.

    Raises:
        UserError: flags contradict each other, or adapters do not fit the model.
    """
    _check(args)
    if spec.mtp_layers:
        problem = "neither transformers nor peft has modules that predict further tokens, so no adapters know them"
        raise flag_error("mtp_num_layers", spec.mtp_layers, problem, "0, or no adapters")
    model = _loaded(args, spec) if args["load_adapter"] is not None else _new(args, spec)
    assert model.lora is not None
    lora = replace(model.lora, base_dtype=args[_BASE])
    try:
        model = adapted(model.base, lora)
    except UserError as error:  # all but the dtype is known to fit
        raise flag_error(_BASE, error.value, error.problem, error.accepted) from None
    for key in ("fp8_format", "compile"):
        if model.in_few_bits and args[key]:
            name = f"--{key.replace('_', '-')}"
            raise flag_error(_BASE, args[_BASE], f"{name} knows no weights in so few bits", f"the run without {name}")
    if args["compile"] and lora.dropout:
        raise flag_error(
            _DROPOUT, lora.dropout, "masks are others in every step, which a compiled layer cannot have",
            "0, or no --compile",
        )  # fmt: skip
    return model


def _new(args: Arguments, spec: ModelSpec) -> ModelSpec:
    from hetero_megatron.spec.adapter_places import chosen

    alpha = args["lora_alpha"] if args["lora_alpha"] is not None else float(args["lora_rank"])
    try:
        dropout, dora = args[_DROPOUT] or 0.0, args["use_dora"]
        lora = Lora(args["lora_rank"], alpha, all_linear(spec.gated), args["use_rslora"], dropout, dora=dora)
        place_flags = (args["lora_targets"], args["lora_layers"], args["lora_sites"], args["lora_alpha"])
        return adapted(spec, chosen(spec, lora, *place_flags))
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
        if key in args.given and key not in _PLACES and args[key] != getattr(lora, name):
            raise flag_error(key, args[key], f"the adapter says {getattr(lora, name)}", "leave the flag out")
    _same_places(args, spec, lora)
    try:
        if args[_DROPOUT] is not None:  # a setting of the run, where all others are the adapter's
            lora = replace(lora, dropout=args[_DROPOUT])
        return adapted(spec, lora)
    except UserError as error:
        if error.field == "dropout":
            raise flag_error(_DROPOUT, error.value, error.problem, error.accepted) from None
        raise flag_error("load_adapter", args["load_adapter"], f"{error.value}: {error.problem}") from None


def _same_places(args: Arguments, spec: ModelSpec, lora: Lora) -> None:
    """UserError: flags say that other projections have adapters than in the loaded one."""
    places = [key for key in _PLACES if key in args.given]
    if not places:
        return
    from hetero_megatron.spec.adapter_places import chosen

    try:
        adapters = chosen(spec, lora, *(args[key] for key in _PLACES))
    except UserError as error:
        raise flag_error(_FLAGS[error.field], error.value, error.problem, error.accepted) from None
    if (adapters.targets, adapters.site_words()) != (lora.targets, lora.site_words()):
        adapter_places = " ".join(lora.site_words() or lora.targets)
        raise flag_error(places[0], args[places[0]], f"the adapter says {adapter_places}", "leave the flag out")


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


def add_lora(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--lora-rank", type=count(1, MAX_RANK), metavar="N",
        help="adapters of this rank are trained beside a frozen base")  # fmt: skip
    help = "projections with one, or a regular expression over names of modules (all linear layers)"
    add("--lora-targets", nargs="+", metavar="NAME", help=help)
    add("--lora-layers", nargs="+", metavar="N-N", help="layers with adapters, such as 0-3 7 (all)")
    add("--lora-sites", nargs="+", metavar="SITE", help=f"all adapters, where they differ: {SITE_WORD}")
    add("--lora-dropout", type=SHARE, metavar="RATE", help="with which they drop elements of their inputs (0)")
    add("--use-dora", action="store_true", help="their rows are scaled to trained lengths (DoRA)")
    help = "in which the frozen projections are stored (the run's dtype)"
    add("--lora-base-dtype", choices=BASE_DTYPES, help=help)
    add("--mtp-num-layers", type=count(0, 64), metavar="N", help="modules that predict further tokens (0)")


def with_lora(args: Namespace, model: ModelSpec, made: MadeFor | None = None) -> ModelSpec:
    """The model with the adapters, or modules that predict further tokens, that the arguments ask for; what they leave
    open is as the plan ``made`` for it has it."""
    if args.mtp_num_layers is None and made is not None:
        args.mtp_num_layers = made.mtp_layers
    if args.mtp_num_layers:
        if args.fp8_format is not None:
            raise UserError(
                "not known beside --fp8-format: a last stage may have nothing in fp8", field="--mtp-num-layers",
                value=args.mtp_num_layers, accepted="0, or no --fp8-format",
            )  # fmt: skip
        try:
            model = replace(model, mtp_layers=args.mtp_num_layers)
        except UserError as error:
            raise UserError(
                error.problem, field="--mtp-num-layers", value=args.mtp_num_layers, accepted=error.accepted
            ) from None
    if made is not None and made.lora is not None:
        for key, value in as_flags(made.lora, [key for key in _PLACES if getattr(args, key)]).items():
            if getattr(args, key) is None or getattr(args, key) is False:
                setattr(args, key, value)
    if args.lora_rank is None:
        for flag, setting in (
            ("--lora-targets", args.lora_targets), ("--lora-layers", args.lora_layers),
            ("--lora-sites", args.lora_sites), ("--lora-dropout", args.lora_dropout),
            ("--lora-base-dtype", args.lora_base_dtype), ("--use-dora", args.use_dora or None),
        ):  # fmt: skip
            if setting is not None:
                value = None if setting is True else setting
                raise UserError("has no effect without --lora-rank", field=flag, value=value)
        return model
    if args.lora_base_dtype is not None and args.fp8_format is not None:
        raise UserError(
            "--fp8-format knows no weights in so few bits", field="--lora-base-dtype", value=args.lora_base_dtype,
            accepted="the command without --fp8-format",
        )  # fmt: skip
    from hetero_megatron.spec.adapter_places import chosen

    try:
        kind = {"dropout": args.lora_dropout or 0.0, "base_dtype": args.lora_base_dtype, "dora": args.use_dora}
        lora = Lora(args.lora_rank, float(args.lora_rank), all_linear(model.gated), **kind)
        return adapted(model, chosen(model, lora, args.lora_targets, args.lora_layers, args.lora_sites))
    except UserError as error:
        flag_of_field = {"dropout": "--lora-dropout", "base_dtype": "--lora-base-dtype"}
        flag_of_field |= {name: f"--{_FLAGS[name].replace('_', '-')}" for name in ("targets", "layers", "sites")}
        name = flag_of_field.get(error.field, "--lora-rank")
        name = "--use-dora" if error.field == "dora" else name
        raise UserError(error.problem, field=name, value=error.value, accepted=error.accepted) from None
