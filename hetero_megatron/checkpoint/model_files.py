"""Files that accompany a model's weights: configuration, tokenizer, chat templates, generation settings, licence.

They are copied wherever weights are. Only regular files with known names are copied, and only if they really are in
their directory (or, in a snapshot of the hub's cache, among the blobs of the same repository): a link in a downloaded
directory must not copy a private file into a model that is published. From a native checkpoint only files listed in its
SHA256SUMS are copied.

A model may also be named: ``--load-hf org/name`` is a model of the Hugging Face hub, taken from its cache if possible.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import allowed_roots, is_within, parse_json, read_bytes

CONFIG = "config.json"
HF_CONFIG = "hf_config.json"  # its name in a native checkpoint, where it is not the checkpoint's own configuration
MAX_BYTES = 256 << 20  # per file; the largest tokenizers have about 35 MB
GENERATION = "generation_config.json"

_TOKENIZER = frozenset(
    {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
        "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "encoder.json", "spiece.model", "sentencepiece.model",
        "sentencepiece.bpe.model", "spm.model", "source.spm", "target.spm", "bpe.codes", "dict.txt", "normalizer.json",
        "tekken.json", "chat_template.jinja", "chat_template.json",
    }
)  # fmt: skip
_OTHER = frozenset(
    {
        CONFIG, GENERATION, "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
        "audio_tokenizer_config.json", "modelcard.json",
    }
)  # fmt: skip
_TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")
_TOKENIZER_PATTERN = re.compile(
    rf"tokenizer\.model\.v\d+(m\d+)?|[\w-]+\.tiktoken|({'|'.join(_TEMPLATE_FOLDERS)})/[\w-][\w.-]*\.jinja", re.ASCII
)
_TEXTS = re.compile(
    r"(readme|licen[cs]e|notice|use_policy|acceptable_use_policy|copying)(\.(md|txt))?", re.IGNORECASE | re.ASCII
)
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|index\.json)")
# For a download from the hub: all of the above, and nothing large besides.
HUB_PATTERNS = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.spm", "*.tiktoken", "*.codes", "tokenizer*", "vocab.*",
    "README*", "LICEN*", "NOTICE*", "USE_POLICY*", "ACCEPTABLE_USE_POLICY*", "COPYING*",
)  # fmt: skip
_FLAT = "+"  # replaces the slash in native checkpoints, which have no folders


class Private(bytes):
    """Content of a file that only its owner could read; copies get the same permissions."""


def is_tokenizer(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer (chat templates included)."""
    return name in _TOKENIZER or bool(_TOKENIZER_PATTERN.fullmatch(name))


def is_known(name: str) -> bool:
    """Whether a file of this name is copied."""
    return name in _OTHER or is_tokenizer(name) or bool(_TEXTS.fullmatch(name))


@dataclass(frozen=True)
class ModelFiles:
    """Files by their names in a Hugging Face directory; ``notices``: files that were left out, with reasons."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """What config.json says; None where there is none.

        Raises:
            UserError: it is no JSON object.
        """
        if CONFIG not in self.files:
            return None
        config = parse_json(self.files[CONFIG], CONFIG)
        if not isinstance(config, dict):
            raise UserError("not a JSON object", where=CONFIG, accepted='{"model_type": ...}')
        return config

    def over(self, base: ModelFiles) -> ModelFiles:
        """These files, and those of ``base`` that are missing here; files of different tokenizers are not mixed."""
        has_tokenizer = any(map(is_tokenizer, self.files))
        base_files = {
            name: content for name, content in base.files.items() if not (has_tokenizer and is_tokenizer(name))
        }
        return ModelFiles({**base_files, **self.files}, (*base.notices, *self.notices))

    def tokenizer(self) -> ModelFiles:
        """Only the files of the tokenizer."""
        return ModelFiles({n: c for n, c in self.files.items() if is_tokenizer(n)}, self.notices)

    def without_tokenizer(self, why: str) -> ModelFiles:
        """All but the tokenizer's files; adds a notice with the reason ``why``."""
        kept_files = {n: c for n, c in self.files.items() if not is_tokenizer(n)}
        notices = [f"the model's tokenizer does not travel along: {why}"] if len(kept_files) < len(self.files) else []
        return ModelFiles(kept_files, (*self.notices, *notices))

    def native(self) -> dict[str, bytes]:
        """Content by file name in a native checkpoint."""
        return {_native_name(name): content for name, content in self.files.items()}

    def write(self, directory: Path) -> None:
        """Write the files, except config.json, into a directory that has none of them."""
        for name, content in self.files.items():
            if name != CONFIG:
                (directory / name).parent.mkdir(exist_ok=True)
                write_new(directory / name, content)


def write_new(path: Path, content: bytes) -> None:
    """Create a file, which must not exist; :class:`Private` content is only readable by its owner."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if isinstance(content, Private) else 0o666)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def from_directory(directory: str | Path) -> ModelFiles:
    """The files to copy from a Hugging Face directory; others with known names are left out with a notice."""
    root = Path(directory)
    try:
        names = sorted(os.listdir(root))
        for folder in _TEMPLATE_FOLDERS:
            if os.path.isdir(root / folder) and is_within(root / folder, allowed_roots(root)):
                names += sorted(f"{folder}/{name}" for name in os.listdir(root / folder))
    except OSError as error:
        raise UserError(f"cannot be listed: {error.strerror}", where=str(root)) from None
    files, notices = _collect(root, [name for name in names if is_known(name)], allowed_roots(root))
    left_out = [_shown(name) for name in names if _is_left_out(root, name)]
    if left_out:
        rest_text = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        notices.append(f"{root}: not copied, as their names are not known: {', '.join(left_out[:5])}{rest_text}")
    return ModelFiles(files, tuple(notices))


def from_checkpoint(directory: Path, listed: Iterable[str]) -> ModelFiles:
    """The files to copy from a native checkpoint: known names among those in its SHA256SUMS (``listed``)."""
    names = {_native_name(name): name for name in map(_own_name, listed) if is_known(name)}
    files, notices = _collect(directory, sorted(set(listed) & names.keys()), (directory.resolve(),))
    return ModelFiles({names[name]: content for name, content in files.items()}, tuple(notices))


def _collect(root: Path, names: Iterable[str], roots: Iterable[Path]) -> tuple[dict[str, bytes], list[str]]:
    """(content by name, notices of what is left out)."""
    files: dict[str, bytes] = {}
    notices = []
    for name in names:
        path, problem = root / name, ""
        if not is_within(path, roots):
            problem = "it is a link to a file outside the directory"
        else:
            try:
                content = read_bytes(path, limit=MAX_BYTES)
                files[name] = content if os.stat(path).st_mode & stat.S_IROTH else Private(content)
            except UserError as error:
                problem = error.problem
            except OSError as error:
                problem = error.strerror or "input/output error"
        if problem:
            notices.append(f"{path} is not copied: {problem}")
    return files, notices


def _is_left_out(root: Path, name: str) -> bool:
    """Whether a user should be told that the file is not copied: neither known, nor weights, nor hidden, nor a folder.
    """
    needs_no_notice = is_known(name) or _WEIGHTS.fullmatch(name) or name.startswith(".")
    return not needs_no_notice and not (root / name).is_dir()


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _native_name(name: str) -> str:
    return HF_CONFIG if name == CONFIG else name.replace("/", _FLAT)


def _own_name(native: str) -> str:
    """The inverse; a native checkpoint's own files have no known name."""
    if native == CONFIG:
        return ""
    return CONFIG if native == HF_CONFIG else native.replace(_FLAT, "/")


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
