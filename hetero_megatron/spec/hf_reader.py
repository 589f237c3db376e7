"""Typed access to a Hugging Face ``config.json``: every refusal names key, value and file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.model_spec import MAX_SIZE
from hetero_megatron.utils.foreign_keys import as_json, by_reason, is_one_of


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Key -> the values that it may have; all of them mean the model that is built here.
FIXED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None, {}),  # the model is code of its own in the directory
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "transformers_weights": (None,),  # names another file of weights
    "fusion_config": (None, {}),
    "distributed_config": (None,),
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, True, None),
    "tie_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "text_config": (None,),
    "hidden_activation": ("silu", "swish", None),
    "attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", None),
    "_attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "rope_ratio": (1, 1.0, None),
    "use_dynamic_ntk": (False, None),
    "use_logn_attn": (False, None),
    "attention_chunk_size": (None,),
    "for_llm_compressor": (False, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}

_REASONS: dict[str, str] = {
    "says who wrote the file, and of which model": (
        "model_type transformers_version _name_or_path name_or_path _commit_hash unsloth_version unsloth_fixed"
        " is_llama_config export_model_type transformers.js_config license language model_name base_model"
        " _diffusers_version custom_pipelines"
    ),
    "notes for people": "_comment comment comments _note note notes description",
    "of older versions of transformers, read no more": (
        "n_special predict_special_tokens output_past eos_token_ids xla_device _attn_implementation_autoset"
        " _flash_attn_2_enabled"
    ),
    "storage: the dtypes of the files count": "dtype torch_dtype use_bfloat16 torchscript tf_legacy_loss",
    "ids and texts of special tokens: they travel with the model, training reads the tokenizer": (
        "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id"
        " decoder_start_token_id bos_token eos_token pad_token unk_token prefix tokenizer_class model_max_length"
        " tokenizer_model_max_length tokenizer_padding_side max_sequence_length n_ctx"
    ),
    "settings of generation": (
        "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty"
        " do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff"
        " exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length"
        " min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups"
        " num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty"
        " return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p use_cache"
        " max_new_tokens cache_implementation task_specific_params"
    ),
    "of classifiers, which `architectures` refuses": (
        "num_labels _num_labels id2label label2id problem_type finetuning_task classifier_dropout summary_type"
        " summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
    ),
    "what a call returns, or how it spares memory": (
        "output_hidden_states output_attentions return_dict use_return_dict chunk_size_feed_forward"
        " gradient_checkpointing experts_implementation"
    ),
    "splits the same products; transformers 5 reads it no more": "pretraining_tp",
}
HARMLESS = by_reason(_REASONS)


def check_keys(config: Mapping[str, Any], family: str, honoured: frozenset[str], where: str) -> None:
    """Refuse, all at once, keys that are in no table; and values that FIXED does not allow.

    A key that nobody knows is accepted with the value ``null``: it says nothing.
    """
    for key in config.keys() & FIXED.keys() - honoured:
        require_one_of(config[key], FIXED[key], key, where)
    known_keys = honoured | FIXED.keys() | HARMLESS.keys()
    unknown = sorted(key for key, value in config.items() if key not in known_keys and value is not None)
    if unknown:
        raise UserError(
            f"not known to be without effect on a {family} model" + also(unknown[1:]), field=unknown[0],
            value=config[unknown[0]], where=where,
            accepted="the keys that docs/checkpoints.md lists; remove others if they say nothing about the model",
        )  # fmt: skip


def also(names: list[str], limit: int = 8) -> str:
    """`` (nor are x, y)`` for the refusal of several keys at once."""
    keys_shown = [*names[:limit], *(["..."] if len(names) > limit else [])]
    return f" (nor {'is' if len(keys_shown) == 1 else 'are'} {', '.join(keys_shown)})" if keys_shown else ""


def require_one_of(value: Any, accepted: tuple[Any, ...], key: str, where: str) -> None:
    """Refuse a value that is none of ``accepted``, of the same type (``true`` is not 1, 1 and 1.0 are)."""
    if not is_one_of(value, accepted):
        words = ", ".join(dict.fromkeys(map(as_json, accepted)))
        if key == "quantization_config":
            method = value.get("quant_method") if isinstance(value, dict) else None
            method_text = f" ({method})" if isinstance(method, str) else ""
            raise UserError(
                f"the weights are quantised{method_text}, and nothing is trained in such a format",
                field=key, value=value, where=where,
                accepted=f"{words}: the model's directory from before the quantisation",
            )  # fmt: skip
        raise UserError(
            "this setting changes the model and is not supported", field=key, value=value, accepted=words, where=where
        )


Config = Mapping[str, Any]
MISSING = object()
MAX_NUMBER = 1e30


class ConfigReader:
    """One object of a configuration.

    ``null`` is not the same as absent: transformers refuses it for most keys. Those for which it means something
    say so (``nullable``).
    """

    def __init__(self, config: Config, where: str, prefix: str = "") -> None:
        self.config, self.where, self.prefix = config, where, prefix

    def refuse(self, problem: str, key: str, accepted: str) -> UserError:
        if key not in self.config:
            return UserError(f"missing, and {problem}", field=self.prefix + key, accepted=accepted, where=self.where)
        value = self.config[key]
        return UserError(problem, field=self.prefix + key, value=value, accepted=accepted, where=self.where)

    def value(self, key: str, default: Any, nullable: bool = False) -> Any:
        value = self.config.get(key, MISSING)
        return default if value is MISSING or (nullable and value is None) else value

    def integer(
        self, key: str, default: int | None = None, nullable: bool = False, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        value = self.value(key, default, nullable)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            problem = "must be a positive integer" if least else "must be an integer"
            quoted = ", without quotation marks" if isinstance(value, str) else ""
            raise self.refuse(problem, key, f"{least} to {most}{quoted}")
        return value

    def positive(self, key: str, default: float | None = None, nullable: bool = False) -> float:
        value = self.value(key, default, nullable)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_NUMBER:
            raise self.refuse("must be a positive number", key, f"a number above 0 and below {MAX_NUMBER:g}")
        return float(value)

    def optional(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or ``null`` for none."""
        return None if self.value(key, default) is None else self.positive(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.refuse("must be true or false", key, "true or false")
        return value

    def must_be(self, key: str, *accepted: Any) -> None:
        """Refuse any value of ``key`` but these (or absence)."""
        if key in self.config:
            require_one_of(self.config[key], accepted, self.prefix + key, self.where)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        items = self.value(key, None)
        ok = isinstance(items, list) and all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < MAX_NUMBER for x in items
        )
        if not ok:
            raise self.refuse("must be a list of positive numbers", key, "numbers above 0")
        return tuple(float(x) for x in items)
