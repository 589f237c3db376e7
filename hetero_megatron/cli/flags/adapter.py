"""Flags about adapters -> a model with them."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.errors import UserError
from hetero_megatron.spec import Lora, ModelSpec, adapted
from hetero_megatron.spec.adapter_modules import default_targets

# field of Lora -> key of the flag that gives it
FLAG_KEYS = {
    "rank": "lora_rank", "alpha": "lora_alpha", "targets": "lora_targets", "rslora": "use_rslora", "dora": "use_dora",
    "layers": "lora_layers", "sites": "lora_sites",
}  # fmt: skip
PLACES = ("lora_targets", "lora_layers", "lora_sites")
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
        lora = Lora(args["lora_rank"], alpha, default_targets(spec), args["use_rslora"], dropout, dora=dora)
        place_flags = (args["lora_targets"], args["lora_layers"], args["lora_sites"], args["lora_alpha"])
        return adapted(spec, chosen(spec, lora, *place_flags))
    except UserError as error:
        key = (FLAG_KEYS | {"dropout": _DROPOUT})[error.field]
        raise flag_error(key, error.value, error.problem, error.accepted) from None


def _loaded(args: Arguments, spec: ModelSpec) -> ModelSpec:
    from hetero_megatron.checkpoint.adapter_config import read_config  # imports torch

    lora = read_config(args["load_adapter"], "--load-adapter", spec)
    if lora.residual is not None and args["load_hf"] is None:
        problem = f"adapters of {lora.residual} count beside what they began with, taken out of the base's weights"
        raise flag_error("load_adapter", args["load_adapter"], problem, "--load-hf with their base")
    for name, key in FLAG_KEYS.items():
        if key in args.given and key not in PLACES and args[key] != getattr(lora, name):
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
    places = [key for key in PLACES if key in args.given]
    if not places:
        return
    from hetero_megatron.spec.adapter_places import chosen

    try:
        adapters = chosen(spec, lora, *(args[key] for key in PLACES))
    except UserError as error:
        raise flag_error(FLAG_KEYS[error.field], error.value, error.problem, error.accepted) from None
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
