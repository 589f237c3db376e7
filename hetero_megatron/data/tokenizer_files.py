"""Checks tokenizer files before a library reads them, and translates the library's failures.

transformers and tokenizers open whatever a directory contains: a FIFO would block them, and damaged files cause many
kinds of errors, some of which (panics of Rust code) are not even an ``Exception``.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hetero_megatron.data.guard import TOKENIZE, CallLimits, Guard
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_file, read_json_object, require_regular, require_text

LIMIT = 256 << 20  # bytes of a tokenizer.json; the largest in use have some 35 MB
_LONGER = 64  # times that a decoder may make a text longer
_LOAD_SECONDS, _LOAD_MEMORY = 10.0, 4 << 30
_FIELD = "--tokenizer-model"
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json", "*.vocab", "*.py")
_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "added_tokens.json", "special_tokens_map.json",
          "chat_template*", "config.json")  # fmt: skip
_ACCEPTED = "a directory with tokenizer.json, or a name that this machine can download or has downloaded"
_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}  # module -> package
_TIKTOKEN = {"tiktoken": "tiktoken", "blobfile": "blobfile"}
_EXTRA = "pip install 'hetero-megatron[sentencepiece]', or a directory with tokenizer.json"


def check_directory(model: str) -> str:
    """The argument for transformers: a directory with intact tokenizer files, or a name on the hub.

    Raises:
        UserError: no such directory, or a file in it that is damaged or not a regular file.
    """
    require_text(model, field=_FIELD)
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path) or (os.path.exists(path) and not os.path.isdir(path)):
        raise UserError("is a file", field=_FIELD, value=model, accepted="the directory that holds it")
    if not os.path.isdir(path):
        if model.startswith((".", "/", "~")) or "\0" in model or len(model) > 255:
            raise UserError("no such directory", field=_FIELD, value=model, accepted=_ACCEPTED)
        return model
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field=_FIELD, value=model) from None
    for name in names:
        # A model may have its tokenizer in a folder `tokenizer`; a folder `tokenizer.json` is none.
        folder = os.path.isdir(path / name) and not os.path.splitext(name)[1]
        if any(fnmatch(name, pattern) for pattern in _FILES) and not folder:
            require_regular(path / name, _FIELD)
            if name.endswith(".json"):
                directory_content = read_json_object(path / name, _FIELD, LIMIT)
                if name == "tokenizer.json":
                    _require_end(directory_content, path / name)
    return str(path)


def _require_end(tokenizer: Mapping[str, Any], path: Path) -> None:
    """UserError for a tokenizer.json whose decoder makes text longer without end, or whose normaliser does not come to
    an end with the tokens that it is applied to when the file is loaded."""
    grown = _growth(tokenizer.get("decoder"))
    if grown > _LONGER:
        raise UserError(
            f"the decoder makes text up to {grown:,.0f} times as long", field=f"{_FIELD}.decoder", value=str(path),
            accepted=f"at most {_LONGER} times",
        )  # fmt: skip
    added_tokens = tokenizer.get("added_tokens")
    if tokenizer.get("normalizer") is None or not isinstance(added_tokens, list):
        return
    if any(isinstance(token, dict) and token.get("normalized") for token in added_tokens):
        guard = Guard(_load, lambda file, _, why: UserError(
            f"loading it {why}", field=_FIELD, value=file, accepted="a tokenizer.json whose normaliser comes to an end"
        ), _LOAD_SECONDS, _LOAD_MEMORY)  # fmt: skip
        list(guard.map([str(path)]))


def _load(path: str, limits: CallLimits) -> None:
    """Whether a file is damaged is found by who needs it."""
    from tokenizers import Tokenizer

    limits.begin(TOKENIZE)
    with suppress(Exception), refuse_panics():
        Tokenizer.from_file(path)
    limits.end()


def _growth(decoder: Any, levels: int = 8) -> float:
    """How many times as long a decoder may make a text, by what it replaces."""
    if not isinstance(decoder, dict) or not levels:
        return 1.0
    if isinstance(inner := decoder.get("decoders"), list):
        return math.prod(_growth(decoder_part, levels - 1) for decoder_part in inner)
    content, pattern = decoder.get("content"), decoder.get("pattern")
    if decoder.get("type") != "Replace" or not isinstance(content, str) or not isinstance(pattern, dict):
        return 1.0
    text = pattern.get("String")
    return max(1.0, len(content) / max(1, len(text) if isinstance(text, str) else 1))


def cannot_load(model: str, error: Exception) -> UserError:
    """The error for a directory or name that transformers cannot load."""
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path) and not os.path.isfile(path / "tokenizer.json"):
        models = [*path.glob("*.model"), *path.glob("*.tiktoken")]
        pieces = any(_is_sentencepiece(file) for file in models)
        kind, packages = ("SentencePiece", _SENTENCEPIECE) if pieces else ("tiktoken", _TIKTOKEN)
        missing = [package for module, package in packages.items() if not _installed(module)]
        if models and missing:
            return UserError(
                f"the directory holds a {kind} model and no tokenizer.json; to read it transformers needs "
                f"{' and '.join(missing)}, not installed here", field=_FIELD, value=model, accepted=_EXTRA,
            )  # fmt: skip
    if isinstance(error, ImportError):
        missing = [package for module, package in (_SENTENCEPIECE | _TIKTOKEN).items() if not _installed(module)]
        fault = f" ({' or '.join(missing)})" if missing else ""
        problem = f"reading this tokenizer needs a package that is not installed here{fault}"
        return UserError(problem, field=_FIELD, value=model, accepted=_EXTRA)
    if os.path.isdir(path) and (diagnosis := _unread(path)):
        return UserError(diagnosis[0], field=_FIELD, value=model, accepted=diagnosis[1])
    fault = "a directory without a tokenizer that transformers can load, or a damaged one" if os.path.isdir(path) else (
        "neither a directory nor a tokenizer that can be had from the Hugging Face hub"
    )  # fmt: skip
    return UserError(f"it is {fault} ({type(error).__name__})", field=_FIELD, value=model, accepted=_ACCEPTED)


def _unread(path: Path) -> tuple[str, str] | None:
    """(what a directory's tokenizer is, what to do), where transformers does not say it."""
    names = os.listdir(path)
    if not any(fnmatch(name, pattern) for name in names for pattern in _VOCABULARIES):
        return "the directory holds no tokenizer", _ACCEPTED
    if "tekken.json" in names and "tokenizer.json" not in names:
        return "the directory holds Mistral's tekken.json and no tokenizer.json", f"{_ACCEPTED}, of the same model"
    with suppress(UserError):
        config = path / "tokenizer_config.json"
        if os.path.isfile(config) and read_json_object(config, _FIELD, LIMIT).get("auto_map"):
            return "the tokenizer needs code that comes with it (auto_map)", "--trust-remote-code, which runs that code"
    return None


def _is_sentencepiece(path: Path) -> bool:
    """Whether a file begins as SentencePiece's do (field 1 of a protobuf message); tiktoken's are lines of text."""
    with open_file(path, _FIELD) as file:
        return file.read(1) == b"\n"


def read_vocabulary(path: str, field: str) -> dict[str, int]:
    """GPT-2's vocab.json: token -> id. UserError for anything else."""
    vocabulary = read_json_object(path, field, LIMIT)
    for token, number in vocabulary.items():
        if type(number) is not int or number < 0:
            raise UserError(
                f"token {token[:40]!r} has no id", field=field, value=path,
                accepted="GPT-2's vocab.json: {token: id, ...}",
            )  # fmt: skip
    return vocabulary


@contextmanager
def refuse_panics() -> Iterator[None]:
    """Turn a Rust panic, which derives from BaseException, into an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError("panic in a library") from None
        raise


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds it
        return False
