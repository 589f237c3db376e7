"""What people give as a model that is none: an adapter, a single file, GGUF, Meta's own format, a folder of models."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.spec.foreign_checkpoints import foreign_format
from hetero_megatron.utils.files import begins_with, read_json_object

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".onnx", ".h5", ".msgpack")
WRITTEN = "a directory that save_pretrained wrote"
_GGUF = (
    "a directory of the weights before quantisation, or what transformers makes of GGUF: "
    "AutoModelForCausalLM.from_pretrained(DIR, gguf_file=FILE).save_pretrained(NEW), and AutoTokenizer the same way"
)


def refuse_mistaken(name: str, field: str) -> None:
    """Refuse a path that is no Hugging Face directory, if it is known what it is.

    Raises:
        UserError: what it is, and what to give instead.
    """
    mistaken = _file(Path(name)) if os.path.isfile(name) else _folder(Path(name)) if os.path.isdir(name) else None
    if mistaken is not None:
        raise UserError(mistaken[0], field=field, value=name, accepted=mistaken[1])


def _file(path: Path) -> tuple[str, str] | None:
    if path.suffix == ".gguf" or _begins(path, b"GGUF"):
        return "is a GGUF file", _GGUF
    if path.suffix in _WEIGHTS:
        return "is a file of weights", f"the directory that it is in, with config.json: {WRITTEN}"
    return None


def _folder(path: Path) -> tuple[str, str] | None:
    try:
        names = sorted(os.listdir(path))
    except OSError:  # whoever opens it will say so
        return None
    if "config.json" in names:
        return None
    if "latest" in names and any(name.startswith("iter_") for name in names):
        return "is a directory of checkpoints", "--load, or what hetero-megatron convert makes of it"
    if "adapter_config.json" in names:
        return f"is an adapter of PEFT's{_base(path)}", "the model as --load-hf, and the adapter as --load-adapter"
    if any(name.endswith(".gguf") for name in names):
        return "holds GGUF", _GGUF
    if "params.json" in names and any(name.startswith("consolidated") for name in names):
        pickled = ", pickled" if any(name.endswith(".pth") for name in names) else ""
        return f"holds weights in their authors' own format (params.json, consolidated.…{pickled})", (
            "the model in Hugging Face form, as the hub has it or as transformers' convert_…_weights_to_hf.py writes it"
        )
    model_folders = [name for name in names if os.path.isfile(path / name / "config.json")]
    if model_folders:
        rest_text = f" and {len(model_folders) - 4} more" if len(model_folders) > 4 else ""
        return "is a directory of Hugging Face checkpoints", (
            f"--load-hf, or convert, with one of the folders in it: {', '.join(model_folders[:4])}{rest_text}"
        )
    foreign = foreign_format(path)
    return None if foreign is None else (f"is {foreign[0]}", foreign[1])


def _base(path: Path) -> str:
    """`` (of MODEL)`` that an adapter says it is for."""
    with suppress(UserError):
        base = read_json_object(path / "adapter_config.json").get("base_model_name_or_path")
        if isinstance(base, str) and base:
            return f" (of {base[:80]})"
    return ""


def _begins(path: Path, mark: bytes) -> bool:
    with suppress(UserError, OSError):
        return begins_with(path, mark)
    return False
