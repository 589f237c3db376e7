"""Models by name: ``--load-hf org/name`` is the hub's model of that name, from its cache where it is there already."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hetero_megatron.errors import UserError

MAX_NAME = 192  # of a model on the hub: owner and name of 96 characters each
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WITHOUT_WEIGHTS = ("*.json", "tokenizer*", "vocab.*", "merges.txt")


def model_directory(name: str, field: str) -> str:
    """A directory as it is; else the local copy of a model of the Hugging Face hub, downloaded if it is not there yet.

    Raises:
        UserError: there is neither a directory nor a model of that name, or the hub cannot be reached.
    """
    if os.path.exists(name) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:  # unlike Path.exists, takes any name
        return name
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(name, allow_patterns=[*_WITHOUT_WEIGHTS, "*.safetensors"])
        if not any(Path(path).glob("*.safetensors")):
            path = snapshot_download(name, allow_patterns=[*_WITHOUT_WEIGHTS, "*.bin"])
        return path
    except (OSError, ValueError, RuntimeError) as error:  # not there, no access, no network, no such name
        raise UserError(
            f"is no directory, and cannot be had from the Hugging Face hub ({type(error).__name__}: no model of that "
            "name, no access, or no network)",
            field=field, value=name, accepted="a directory that save_pretrained wrote, or a name on the hub",
        ) from error  # fmt: skip
