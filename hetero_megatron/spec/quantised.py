"""Checkpoints in fewer bits whose weights are dequantised as they are read: block FP8, MXFP4, bitsandbytes' formats."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.hf_reader import Config, ConfigReader

KEY, FP8, MXFP4, BITSANDBYTES = "quantization_config", "fp8", "mxfp4", "bitsandbytes"
_ANY = frozenset({"modules_to_not_convert", "modules_to_convert", "ignored_layers"})  # the tensors say it
# Of bitsandbytes: what the tensors say too, and how products would be computed.
_HARMLESS = frozenset({
    "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype",
    "bnb_4bit_use_double_quant", "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload",
})  # fmt: skip
_STORAGE = ("uint8", "bfloat16", "float16", "float32")  # of 4 bits: bytes, or bytes as elements of these
# Method -> its keys and the values that they may have.
_FORMATS: dict[str, dict[str, tuple[Any, ...]]] = {
    FP8: {
        "fmt": ("e4m3", None), "activation_scheme": ("dynamic",), "scale_fmt": ("float", "ue8m0", None),
        "expert_dtype": ("fp8",), "dequantize": (True, False),
    },
    MXFP4: {"dequantize": (True, False)},
    BITSANDBYTES: {"bnb_4bit_quant_storage": (*_STORAGE, None), "llm_int8_has_fp16_weight": (False, None)},
}  # fmt: skip
_FORMAT_NAMES = {FP8: "block FP8", MXFP4: "MXFP4", BITSANDBYTES: "bitsandbytes' 4 or 8 bits"}


def format_name(method: str) -> str:
    """As messages call it."""
    return _FORMAT_NAMES[method]


def method_of(config: Config) -> str | None:
    """The format of the weights, where it is one that is dequantised; gpt-oss alone has MXFP4, and files of
    bitsandbytes' need not name it."""
    settings = config.get(KEY)
    if not isinstance(settings, dict):
        return None
    bits = any(settings.get(f"load_in_{bits}bit") is True for bits in (4, 8))
    method = settings.get("quant_method", BITSANDBYTES if bits else None)
    is_read = method in (FP8, BITSANDBYTES) or (method == MXFP4 and config.get("model_type") == "gpt_oss")
    return method if is_read else None


def fp8_block(config: Config, where: str) -> tuple[int, int]:
    """(rows, columns) of a weight that have one scale. UserError: weights have another form."""
    reader = ConfigReader(config[KEY], where, f"{KEY}.")
    block = reader.value("weight_block_size", [128, 128])
    ok = isinstance(block, list) and len(block) == 2 and all(type(size) is int and 0 < size < 1 << 20 for size in block)
    if not ok:
        raise reader.refuse("weights with one scale for blocks are read", "weight_block_size", "two sizes: [128, 128]")
    return block[0], block[1]


def without_quantisation(config: Config, where: str) -> tuple[Config, tuple[str, ...]]:
    """(the configuration of the dequantised model, notices); of other formats, or none, as it is.

    Raises:
        UserError: a form of these formats that is not read.
    """
    method = method_of(config)
    if method is None:
        return config, ()
    reader = ConfigReader(config[KEY], where, f"{KEY}.")
    others = {FP8: {"weight_block_size"}, MXFP4: set[str](), BITSANDBYTES: _HARMLESS}[method]
    known_keys = _FORMATS[method].keys() | _ANY | {"quant_method"} | others
    for key in sorted(config[KEY].keys() - known_keys):
        raise reader.refuse(f"unknown with quant_method {method}", key, ", ".join(sorted(known_keys)))
    for key, values in _FORMATS[method].items():
        reader.must_be(key, *values)
    if method == FP8:
        fp8_block(config, where)
    notice = f"{where}: the weights are in {format_name(method)}: they are dequantised as they are read"
    return {key: value for key, value in config.items() if key != KEY}, (notice,)
