"""Tokenizers under Megatron's names: text -> token ids, and which id ends a document.

``ByteTokenizer`` is built in and needs no files. Hugging Face libraries are imported only by the types that use them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetero_megatron.errors import UserError

TOKENIZER_TYPES = ("ByteTokenizer", "NullTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer")

_HUGGING_FACE = "--tokenizer-type HuggingFaceTokenizer with a directory or name of the same tokenizer"
_REFUSED = {  # Megatron's names that this version does not read, and what to use instead
    "SentencePieceTokenizer": _HUGGING_FACE,
    "GPTSentencePieceTokenizer": _HUGGING_FACE,
    "Llama2Tokenizer": _HUGGING_FACE,
    "TikTokenizer": _HUGGING_FACE,
    "NullMultimodalTokenizer": "--tokenizer-type NullTokenizer",
    "MultimodalTokenizer": "a text tokenizer: this version trains on text only",
    "SFTTokenizer": "--tokenizer-type HuggingFaceTokenizer on conversations that are already rendered to text",
    "BertWordPieceLowerCase": "a tokenizer of a GPT model: this version trains no BERT",
    "BertWordPieceCase": "a tokenizer of a GPT model: this version trains no BERT",
}


class Tokenizer(Protocol):
    """Text -> ids.

    Attributes:
        name: for messages.
        vocab_size: ids are in ``[0, vocab_size)``, ``eod`` included.
        eod: the id that ends a document.
        fingerprint: changes whenever an id could change; part of cache keys.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, without the end of document; integer [n]."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """The 256 byte values of UTF-8, and 256 for the end of a document."""

    name, fingerprint, vocab_size, eod = "ByteTokenizer", "bytes", 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")


class NullTokenizer:
    """Ids written as decimal numbers; as in Megatron, the end of a document is one id more than ``vocab_size``."""

    def __init__(self, vocab_size: int) -> None:
        self.name, self.fingerprint = "NullTokenizer", f"null-{vocab_size}"
        self.vocab_size, self.eod = vocab_size + 1, vocab_size

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        except ValueError as error:
            raise UserError(
                f"the text holds something that is no number ({error})",
                field="--tokenizer-type",
                value="NullTokenizer",
                accepted="text made of token ids, or another tokenizer type",
            ) from None
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            bad = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise UserError(
                f"the text holds id {bad}", field="--vocab-size", value=self.eod, accepted=f"ids 0..{self.eod - 1}"
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(int(i)) for i in ids)


class HuggingFaceTokenizer:
    """A tokenizer of transformers, from a directory or by its name on the hub."""

    def __init__(self, model: str, trust_remote_code: bool = False) -> None:
        if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
            raise UserError(
                "no such directory", field="--tokenizer-model", value=model, accepted=_HUGGING_FACE.split("with ")[1]
            )
        from transformers import AutoTokenizer

        try:
            source = str(Path(model).expanduser()) if model.startswith("~") else model
            self._inner: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises many kinds, all meaning that it cannot be loaded
            raise UserError(
                f"transformers cannot load this tokenizer: {_first_line(error)}",
                field="--tokenizer-model",
                value=model,
                accepted="a directory with tokenizer.json, or a name that this machine can download or has downloaded",
            ) from None
        if self._inner.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token to end documents with",
                field="--tokenizer-model",
                value=model,
                accepted="a tokenizer whose tokenizer_config.json sets eos_token",
            )
        self.name = f"HuggingFaceTokenizer {model}"
        self.vocab_size: int = len(self._inner)
        self.eod: int = int(self._inner.eos_token_id)
        self.fingerprint = _fingerprint(self._inner)

    def encode(self, text: str) -> np.ndarray:
        # As Megatron does, special tokens that the tokenizer itself adds (Llama's BOS) are kept.
        return np.asarray(self._inner(text, verbose=False).input_ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._inner.decode([int(i) for i in ids]))

    def special_ids(self) -> dict[str, int | None]:
        """Ids of the tokens that config.json names."""
        return {f"{token}_token_id": getattr(self._inner, f"{token}_token_id") for token in ("bos", "eos", "pad")}

    def save(self, directory: str | Path) -> None:
        """Its files, as transformers writes them."""
        self._inner.save_pretrained(directory)


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from its vocab.json and merges.txt; documents end with ``<|endoftext|>``."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from tokenizers.implementations import ByteLevelBPETokenizer

        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not Path(path).is_file():
                raise UserError("no such file", field=flag, value=path, accepted="GPT-2's vocab.json and merges.txt")
        try:
            vocabulary = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
            self._inner = ByteLevelBPETokenizer(vocab_file, merge_file)
            self.eod = int(vocabulary["<|endoftext|>"])
        except KeyError:
            raise UserError(
                "has no <|endoftext|> to end documents with", field="--vocab-file", value=vocab_file
            ) from None
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(
                f"not GPT-2's files: {_first_line(error)}", field="--vocab-file", value=f"{vocab_file} {merge_file}"
            ) from None
        self.name, self.vocab_size = "GPT2BPETokenizer", int(self._inner.get_vocab_size())
        text = Path(vocab_file).read_bytes() + Path(merge_file).read_bytes()
        self.fingerprint = hashlib.sha256(text).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._inner.encode(text).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._inner.decode([int(i) for i in ids]))

    def to_json(self) -> str:
        """As a tokenizer.json."""
        return str(self._inner.to_str())


def build_tokenizer(
    type: str,
    model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """The tokenizer that Megatron's flags of these names ask for; UserError when a flag that it needs is missing."""
    if type == "ByteTokenizer":
        return ByteTokenizer()
    if type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise UserError(
                "NullTokenizer needs to know how many ids there are", field="--vocab-size", value=vocab_size,
                accepted="an integer >= 1",
            )  # fmt: skip
        return NullTokenizer(vocab_size)
    if type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(_needed("--tokenizer-model", model, type), trust_remote_code)
    if type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(_needed("--vocab-file", vocab_file, type), _needed("--merge-file", merge_file, type))
    raise UserError(
        "this version does not read that tokenizer" if type in _REFUSED else "no such tokenizer type",
        field="--tokenizer-type",
        value=type,
        accepted=_REFUSED.get(type, ", ".join(TOKENIZER_TYPES)),
    )


def _needed(flag: str, value: str | None, type: str) -> str:
    if not value:
        raise UserError(f"{type} needs this flag", field=flag, value=value, accepted="a path or name")
    return value


def _fingerprint(inner: Any) -> str:
    """Of everything that decides ids: the whole fast tokenizer, or else the vocabulary and the class."""
    if getattr(inner, "backend_tokenizer", None) is not None:
        text = str(inner.backend_tokenizer.to_str())
    else:
        text = json.dumps([inner.__class__.__name__, sorted(inner.get_vocab().items())])
    return hashlib.sha256(text.encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [error.__class__.__name__])[0]
