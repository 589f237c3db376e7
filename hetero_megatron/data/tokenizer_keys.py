"""Every key of tokenizer_config.json that transformers reads, or writes itself; others are said, with the nearest."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hetero_megatron.utils.foreign_keys import KeyTable, by_reason

_SPECIAL = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]
KEYS = KeyTable(
    honoured=frozenset((
        *_SPECIAL, "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens",
        "added_tokens_decoder", "model_max_length", "max_len", "padding_side", "truncation_side", "model_input_names",
        "clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
        "split_special_tokens", "chat_template", "add_bos_token", "add_eos_token", "add_prefix_space",
        "tokenizer_class", "auto_map", "fix_mistral_regex", "vocab_file", "merges_file", "tokenizer_file", "from_slow",
        "vocab", "merges", "post_processor", "unk_id", "_spm_precompiled_charsmap",
    )),
    fixed={},
    harmless=by_reason({
        "who wrote the file, and how it was loaded": (
            "backend is_local local_files_only name_or_path processor_class transformers_version"
            " special_tokens_map_file trust_remote_code use_fast use_auth_token token revision cache_dir device_map"
            " torch_dtype dtype _commit_hash _from_auto files_loaded gguf_file tokenizer_object tokenizer_type"
            " feature_extractor_type image_processor_type task subfolder force_download proxies"
        ),
        "of one call of the tokenizer, which is made without it here": (
            "max_length stride truncation_strategy truncation padding pad_to_multiple_of pad_token_type_id"
            " tokenizer_padding tokenizer_truncation return_token_type_ids verbose max_target_length"
        ),
        "of decoding, or of chats by other programs": (
            "spaces_between_special_tokens response_template response_schema chat_control_tokens errors"
            " decode_with_prefix_space"
        ),
        "of classes that turn tokens themselves from one form to another, which tokenizer.json says": (
            "legacy sp_model_kwargs use_default_system_prompt trim_offsets vocab_size"
        ),
    }),
)  # fmt: skip


def unread_keys(tokenizer: Any) -> list[str]:
    """Keys with a value that neither transformers nor the tokenizer's class reads, each with the nearest known one."""
    class_keys = _of_class(type(tokenizer))
    init_kwargs: Mapping[str, Any] = getattr(tokenizer, "init_kwargs", {})
    table = KeyTable(KEYS.honoured | class_keys, KEYS.fixed, KEYS.harmless)
    return [f"{key}{table.nearest(key)}" for key in table.unknown(init_kwargs) if not _names_token(key, init_kwargs)]


def _of_class(kind: type) -> frozenset[str]:
    """Names of its constructor's arguments, its bases' among them."""
    names: set[str] = set()
    for base in kind.__mro__[:-1]:
        if "__init__" in vars(base):
            names |= inspect.signature(vars(base)["__init__"]).parameters.keys()
    return frozenset(names - {"self", "args", "kwargs"})


def _names_token(key: str, init_kwargs: Mapping[str, Any]) -> bool:
    """A special token of a model's own (``image_token``), which transformers takes under any such name."""
    value = init_kwargs[key]
    return key.endswith("_token") and (isinstance(value, str) or type(value).__name__ == "AddedToken")
