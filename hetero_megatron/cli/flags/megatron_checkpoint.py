"""The arguments that a Megatron checkpoint stores -> the model that it is of, by the rules of the same flags here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.cli.flags.megatron_latent import check_latents, is_latent, with_latents
from hetero_megatron.cli.flags.model import build_spec
from hetero_megatron.cli.flags.parse import parse
from hetero_megatron.cli.megatron_keys import (
    EXPERTS,
    ROTARY,
    SWITCHES,
    SWITCHES_OF_EXPERTS,
    VALUES,
    check_stored,
    with_present_names,
)
from hetero_megatron.errors import UserError
from hetero_megatron.spec import ModelSpec

_WHERE = "the checkpoint's arguments"
# What latent attention reads otherwise, or not.
_NOT_OF_LATENTS = {"kv_channels", "group_query_attention", "num_query_groups", "qk_layernorm"}
# Beside --model these say how the model was trained, not what it is.
_OF_TRAINING = {"seq_length", "max_position_embeddings", "init_method_std"}


def spec_of_arguments(
    stored: Mapping[str, Any], model: str | None, rows: int
) -> tuple[ModelSpec, tuple[str, ...]]:
    """(the model of a checkpoint, notices of arguments that nobody knows).

    Args:
        stored: the arguments of the run that wrote it; may be empty if ``model`` is given.
        model: as for --model: a directory, a config.json or a preset, which has to agree with them; or None.
        rows: of the embedding in the checkpoint, padding included; the vocabulary where nothing says it.

    Raises:
        UserError: nothing says what the model is, the two contradict each other, or it is one that is not supported.
    """
    stored = with_present_names(stored, _WHERE)
    notices = check_stored(stored, _WHERE)
    if not stored and model is None:
        problem = "missing, and the checkpoint does not store the arguments of its run"
        raise UserError(problem, field="--model", accepted="the model's directory or config.json")
    words = _words(stored, model is not None)
    words += ["--model", model] if model is not None else ["--vocab-size", str(_vocabulary(stored, rows))]
    try:
        spec = build_spec(parse(words), None)
        if is_latent(stored) and model is None:
            spec = with_latents(spec, stored)
        elif is_latent(stored):
            check_latents(spec, stored, str(model))
        return spec, notices
    except UserError as error:
        origin = error.where if error.where not in ("", "command line") else _WHERE
        raise UserError(
            error.problem, field=error.field, value=error.value, accepted=_accepted(error, model), where=origin
        ) from None


def _accepted(error: UserError, model: str | None) -> str:
    if error.field == "--model":
        return error.accepted
    return "a checkpoint of that model" if model is not None else "another model"


def _words(stored: Mapping[str, Any], beside_model: bool) -> list[str]:
    """The command line that describes the model, but for latent attention."""
    latent = is_latent(stored)
    stored = {key: value for key, value in stored.items() if not (latent and key in _NOT_OF_LATENTS)}
    rope = stored.get("position_embedding_type") == "rope" or stored.get("use_rotary_position_embeddings") is True
    gated = any(stored.get(key) for key in ("swiglu", "squared_relu", "openai_gelu"))
    experts = bool(stored.get("num_experts"))
    words = []
    for key in (*VALUES, *(ROTARY if rope else ()), *(EXPERTS if experts else ())):
        if stored.get(key) is not None and not (beside_model and key in _OF_TRAINING):
            words += [_flag(key), str(stored[key])]
    switches = (*SWITCHES, *(SWITCHES_OF_EXPERTS if experts else ()))
    words += [_flag(key) for key in switches if stored.get(key) is True]
    if stored.get("use_rotary_position_embeddings") is True and stored.get("position_embedding_type") is None:
        words += ["--use-rotary-position-embeddings"]
    if stored.get("group_query_attention") is True:
        words += ["--group-query-attention", "--num-query-groups", str(stored.get("num_query_groups"))]
    if rope and stored.get("use_rope_scaling") is True:
        words += ["--use-rope-scaling", "--rope-scaling-factor", str(stored.get("rope_scaling_factor", 8.0))]
    if stored.get("add_bias_linear") is False:
        words += ["--disable-bias-linear"]
    if stored.get("bias_gelu_fusion") is False and not gated:
        words += ["--no-bias-gelu-fusion"]
    if stored.get("window_size") is not None:
        words += ["--window-size", ",".join(map(str, stored["window_size"]))]
    return words


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _vocabulary(stored: Mapping[str, Any], rows: int) -> int:
    """Without padding where the arguments say it; else all rows, which take part in Megatron's softmax too."""
    size = stored.get("vocab_size")
    if type(size) is not int or size < 1:
        return rows
    return size + (stored.get("tokenizer_type") == "NullTokenizer")
