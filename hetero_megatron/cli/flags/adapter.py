"""Flags about adapters -> a model with them."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.errors import UserError
from hetero_megatron.spec import Lora, ModelSpec, adapted
from hetero_megatron.spec.lora import all_linear
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
    found = replace(found, lora=lora)
    for key in ("fp8_format", "compile"):
        if found.in_int8 and args[key]:
            name = f"--{key.replace('_', '-')}"
            raise flag_error(_BASE, args[_BASE], f"{name} knows no weights in 8 bits", f"the run without {name}")
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

    lora = read_config(args["load_adapter"], "--load-adapter")
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
