"""Models by name: ``--load-hf org/name`` is the hub's model of that name, from its cache where it is there already."""

from __future__ import annotations

import re
from pathlib import Path

from hetero_megatron.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WITHOUT_WEIGHTS = ("*.json", "tokenizer*", "vocab.*", "merges.txt")


def model_directory(name: str, field: str) -> str:
    """A directory as it is; else the local copy of a model of the Hugging Face hub, downloaded if it is not there yet.

    Raises:
        UserError: there is neither a directory nor a model of that name, or the hub cannot be reached.
    """
    if Path(name).exists() or not _NAME.fullmatch(name):
        return name
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(name, allow_patterns=[*_WITHOUT_WEIGHTS, "*.safetensors"])
        if not any(Path(path).glob("*.safetensors")):
            path = snapshot_download(name, allow_patterns=[*_WITHOUT_WEIGHTS, "*.bin"])
        return path
    except (OSError, ValueError, RuntimeError) as error:  # not there, no access, no network, no such name
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"is no directory, and cannot be had from the Hugging Face hub ({type(error).__name__}: {why})",
            field=field, value=name, accepted="a directory that save_pretrained wrote, or a name on the hub",
        ) from error  # fmt: skip
