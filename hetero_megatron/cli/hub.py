"""Models by name: ``--load-hf org/name`` is a model of the Hugging Face hub, taken from its cache if possible."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hetero_megatron.checkpoint.model_files import HUB_PATTERNS
from hetero_megatron.errors import UserError

MAX_NAME = 192  # of a model on the hub: owner and name of 96 characters each
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_REASONS = {  # huggingface_hub's exceptions, the special ones first
    "GatedRepoError": "its authors ask for permission: accept their terms there, and log in with `hf auth login`",
    "RepositoryNotFoundError": "there is no such model, or it is private",
    "HFValidationError": "that is no name of a model",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and it was not downloaded before",
    "LocalEntryNotFoundError": "it was not downloaded before, and the hub cannot be reached or HF_HUB_OFFLINE is set",
    "HfHubHTTPError": "the hub answered with an error",
}


def model_directory(name: str, field: str) -> str:
    """A directory as it is; else the local copy of a model of the Hugging Face hub, downloaded if it is not there yet.

    Raises:
        UserError: there is neither a directory nor a model of that name, or the hub cannot be reached.
    """
    if os.path.exists(name) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:  # unlike Path.exists, takes any name
        return name
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(name, allow_patterns=[*HUB_PATTERNS, "*.safetensors"])
        if not any(Path(path).glob("*.safetensors")):
            path = snapshot_download(name, allow_patterns=[*HUB_PATTERNS, "*.bin"])
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"is no directory, and cannot be had from the Hugging Face hub ({_why(error)})",
            field=field, value=name, accepted="a directory that save_pretrained wrote, or a name on the hub",
        ) from error  # fmt: skip


def _why(error: Exception) -> str:
    """The reason in one line; huggingface_hub's messages span many lines and refer to its Python API."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    for kind, words in _REASONS.items():
        if kind in kinds:
            return words
    return getattr(error, "strerror", None) or "the download failed"
