"""Tokenizers under Megatron's names: text -> token ids, and which id ends a document.

``ByteTokenizer`` is built in and needs no files. Hugging Face libraries are imported only by the types that use them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from hetero_megatron.data.guard import TOKENIZE, UNLIMITED, CallLimits
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_bytes
from hetero_megatron.utils.text import listed

# Tokens of a text, at most: byte by byte, with letters that a normaliser takes apart (18 for the longest).
_OWN_TOKENS, _TOKENS_PER_BYTE = 1 << 16, 32
MAX_ID = 2**31 - 2  # token files hold 32 bits


USED_BY: Mapping[str, tuple[str, ...]] = {  # flag -> the types that read it
    "--tokenizer-model": ("HuggingFaceTokenizer", "Llama2Tokenizer"),
    "--vocab-file": ("GPT2BPETokenizer",),
    "--merge-file": ("GPT2BPETokenizer",),
    "--trust-remote-code": ("HuggingFaceTokenizer",),
}


class Tokenizer(Protocol):
    """Text -> ids.

    Attributes:
        name: for messages.
        vocab_size: ids are in ``[0, vocab_size)``, ``eod`` included; not all of them need to be in use.
        eod: the id that ends a document; None: there is none.
        fingerprint: changes whenever an id could change; part of cache keys.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int | None: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str, limits: CallLimits = UNLIMITED) -> np.ndarray:
        """Ids of a text, without the end of document; integer [n]."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """The 256 byte values of UTF-8, and 256 for the end of a document."""

    name, fingerprint, vocab_size, eod = "ByteTokenizer", "bytes", 257, 256

    def encode(self, text: str, limits: CallLimits = UNLIMITED) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")


_ID = re.compile(r"-?[0-9]{1,18}")  # as int64


class NullTokenizer:
    """Ids written as decimal numbers; as in Megatron, the end of a document is one id more than ``vocab_size``."""

    def __init__(self, vocab_size: int) -> None:
        self.name, self.fingerprint = "NullTokenizer", f"null-{vocab_size}"
        self.vocab_size, self.eod = vocab_size + 1, vocab_size

    def encode(self, text: str, limits: CallLimits = UNLIMITED) -> np.ndarray:
        words = text.split()
        outside = next((word for word in words if not _ID.fullmatch(word)), None)
        if outside is not None:
            word_text = outside if len(outside) <= 40 else f"{outside[:37]}..."
            raise UserError(
                f"the text holds {word_text!r}, which is no token id",
                field="--tokenizer-type",
                value="NullTokenizer",
                accepted="text made of token ids, or another tokenizer type",
            )
        ids = np.array([int(word) for word in words], dtype=np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            outside = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise UserError(
                f"the text holds id {outside}", field="--vocab-size", value=self.eod, accepted=f"ids 0..{self.eod - 1}"
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(int(i)) for i in ids)


class HuggingFaceTokenizer:
    """A tokenizer of transformers, from a directory or by its name on the hub."""

    def __init__(self, model: str, trust_remote_code: bool = False) -> None:
        from hetero_megatron.data.tokenizer_files import cannot_load, check_directory, refuse_panics

        source = check_directory(model)
        from transformers import AutoTokenizer

        try:
            with refuse_panics():
                self._inner: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
                ids = [*self._inner.get_vocab().values(), *self._inner.all_special_ids]
        except Exception as error:  # transformers raises many kinds, all meaning that it cannot be loaded
            raise cannot_load(model, error) from None
        eos = self._inner.eos_token_id
        self.name = f"HuggingFaceTokenizer {model}"
        self.vocab_size: int = _size(ids, "--tokenizer-model", model)
        self.eod: int | None = eos if eos is None else int(eos)
        self.fingerprint = _fingerprint(self._inner)

    @property
    def notices(self) -> tuple[str, ...]:
        """What its tokenizer_config.json says that nothing reads."""
        from hetero_megatron.data.tokenizer_keys import unread_keys

        keys = unread_keys(self._inner)
        return (f"{self.name}: not read of tokenizer_config.json: {listed(keys)}",) if keys else ()

    def encode(self, text: str, limits: CallLimits = UNLIMITED) -> np.ndarray:
        # As Megatron does, special tokens that the tokenizer itself adds (Llama's BOS) are kept.
        ids = _encoded(self.name, lambda: self._inner(text, verbose=False).input_ids, limits)
        return require_size(ids, text, self.name)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def tokens(self) -> dict[str, int]:
        """Ids by token."""
        return dict(self._inner.get_vocab())

    def stops_at(self, texts: Sequence[str]) -> Callable[[list[int]], bool]:
        """Whether a text of these ids ends with one of ``texts``, as transformers has it: in its last token."""
        import torch
        from transformers import StopStringCriteria

        criteria = StopStringCriteria(self._inner, list(texts))
        return lambda ids: bool(criteria(torch.tensor([ids]), None)[0])  # type: ignore[arg-type]

    @property
    def chat_templates(self) -> str | Mapping[str, str] | None:
        """Jinja text of its files (tokenizer_config.json, chat_template.jinja, additional_chat_templates): the only
        one, or several by name. UserError: it is no text."""
        templates = self._inner.chat_template
        texts = list(templates.values()) if isinstance(templates, dict) else [templates]
        if templates is not None and not all(isinstance(text, str) for text in texts):
            raise UserError(
                "is no text, and no list of names and texts", field="chat_template", value=repr(templates)[:80],
                accepted="Jinja text", where=self.name,
            )  # fmt: skip
        return cast("str | Mapping[str, str] | None", templates)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of bos_token and so on, which chat templates may use."""
        return dict(self._inner.special_tokens_map)

    @property
    def pad(self) -> int:
        """An id for places that nobody looks at."""
        pad_id = self._inner.pad_token_id
        return int(pad_id if pad_id is not None else self.eod or 0)

    @property
    def has_offsets(self) -> bool:
        return bool(self._inner.is_fast)

    def encode_offsets(
        self, text: str, add_special_tokens: bool, where: str = "", limits: CallLimits = UNLIMITED
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], characters that each comes from int64 [n, 2], empty for tokens that the tokenizer adds)."""
        options = {"add_special_tokens": add_special_tokens, "return_offsets_mapping": True, "verbose": False}
        encodings = []

        def encode() -> Sequence[int]:
            encodings.append(self._inner(text, **options))
            return cast("Sequence[int]", encodings[0].input_ids)

        try:
            ids = require_size(_encoded(self.name, encode, limits), text, self.name)
        except UserError as error:
            raise UserError(str(error), where=where) from None
        return ids, np.asarray(encodings[0].offset_mapping, np.int64).reshape(-1, 2)

    def special_ids(self) -> dict[str, int | None]:
        """Ids of the tokens that config.json names."""
        return {f"{token}_token_id": getattr(self._inner, f"{token}_token_id") for token in ("bos", "eos", "pad")}

    def save(self, directory: str | Path) -> None:
        """Its files, as transformers writes them."""
        self._inner.save_pretrained(directory)


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from its vocab.json and merges.txt; documents end with ``<|endoftext|>``."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from hetero_megatron.data.tokenizer_files import read_vocabulary, refuse_panics

        vocabulary = read_vocabulary(vocab_file, "--vocab-file")
        text = read_bytes(vocab_file, "--vocab-file") + read_bytes(merge_file, "--merge-file")
        from tokenizers.implementations import ByteLevelBPETokenizer

        try:
            with refuse_panics():
                self._inner = ByteLevelBPETokenizer(vocab_file, merge_file)
        except Exception:  # tokenizers raises plain Exception
            raise UserError(
                "the two files do not belong together, or one is damaged", field="--merge-file",
                value=f"{vocab_file} {merge_file}", accepted="GPT-2's vocab.json and merges.txt",
            ) from None  # fmt: skip
        self.name = f"GPT2BPETokenizer {vocab_file} {merge_file}"
        self.vocab_size = _size(vocabulary.values(), "--vocab-file", vocab_file)
        self.eod: int | None = vocabulary.get("<|endoftext|>")
        self.fingerprint = hashlib.sha256(text).hexdigest()

    def encode(self, text: str, limits: CallLimits = UNLIMITED) -> np.ndarray:
        return require_size(_encoded(self.name, lambda: self._inner.encode(text).ids, limits), text, self.name)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._inner.decode([int(i) for i in ids]))

    def to_json(self) -> str:
        """As a tokenizer.json."""
        return str(self._inner.to_str())


class Llama2Tokenizer:
    """SentencePiece's BPE from a tokenizer.model (or the directory that holds one), with the beginning of a sequence
    before each document and its end after it, as Megatron's type of this name has them."""

    def __init__(self, model: str) -> None:
        from hetero_megatron.data.sentencepiece_model import byte_pairs, read_model
        from hetero_megatron.data.tokenizer_files import refuse_panics

        file = str(Path(model) / "tokenizer.model") if Path(model).is_dir() else model
        pieces_model = read_model(file, "--tokenizer-model")
        with refuse_panics():
            self._inner = byte_pairs(pieces_model)
        self.name, self.vocab_size = f"Llama2Tokenizer {model}", len(pieces_model.pieces)
        self._bos, self.eod, self.fingerprint = pieces_model.bos, pieces_model.eos, f"llama2-{pieces_model.digest}"

    def encode(self, text: str, limits: CallLimits = UNLIMITED) -> np.ndarray:
        ids = _encoded(self.name, lambda: [self._bos, *self._inner.encode(text).ids], limits)
        return require_size(ids, text, self.name)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._inner.decode([int(i) for i in ids if i not in (self._bos, self.eod)]))


def notices_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What a user should know about the tokenizer's files."""
    return tokenizer.notices if isinstance(tokenizer, HuggingFaceTokenizer) else ()


def plain_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """What ``ids`` say, without special tokens."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.decode(ids, skip_special=True)
    return tokenizer.decode(ids)


def is_foreign(tokenizer: Tokenizer) -> bool:
    """Whether files that others wrote say what it does."""
    return isinstance(tokenizer, (HuggingFaceTokenizer, GPT2BPETokenizer, Llama2Tokenizer))


def too_costly(name: str, why: str, where: str) -> UserError:
    """The refusal of a tokenizer that cannot be let go on with a text; ``why``: it ``takes more than 2 s``."""
    return UserError(
        f"the tokenizer {why} for this text", field="tokenizer", value=name, where=where,
        accepted="a tokenizer whose normaliser and patterns come to an end",
    )  # fmt: skip


def with_end(ids: np.ndarray, eod: int) -> np.ndarray:
    """Ids of a document with one ``eod`` after them, whether or not the tokenizer adds ends of its own."""
    end = len(ids)
    while end and ids[end - 1] == eod:
        end -= 1
    return np.append(ids[:end], np.asarray(eod, ids.dtype))


def required_eod(tokenizer: Tokenizer, why: str) -> int:
    """The end-of-document id; UserError if the tokenizer has none."""
    if tokenizer.eod is None:
        raise UserError(
            f"the tokenizer has no end-of-sequence token (eos_token), but {why}", field="tokenizer",
            value=tokenizer.name,
            accepted="a tokenizer whose tokenizer_config.json sets eos_token (or a vocab.json with <|endoftext|>), or "
            ".bin/.idx that hetero-megatron preprocess wrote without --append-eod",
        )  # fmt: skip
    return tokenizer.eod


def _size(ids: Any, field: str, value: str) -> int:
    """One more than the largest id (ids may have gaps)."""
    largest = max(ids, default=-1)
    if not 0 <= largest <= MAX_ID:
        problem = "has no tokens" if largest < 0 else f"has token id {largest}"
        raise UserError(problem, field=field, value=value, accepted=f"token ids of 0 to {MAX_ID:,}")
    return int(largest) + 1


def _encoded(name: str, encode: Callable[[], Sequence[int]], limits: CallLimits) -> np.ndarray:
    """Ids as int64. A damaged tokenizer may only fail here."""
    from hetero_megatron.data.tokenizer_files import refuse_panics

    limits.begin(TOKENIZE)
    try:
        with refuse_panics():
            return np.asarray(encode(), dtype=np.int64)
    except Exception as error:  # libraries raise plain Exception, or return None among the ids
        raise UserError(
            f"the tokenizer fails on a text ({type(error).__name__}): its files are damaged or contradict each other",
            field="tokenizer", value=name, accepted="the undamaged files of one tokenizer",
        ) from None  # fmt: skip
    finally:
        limits.end()


def require_size(ids: np.ndarray, text: str, name: str) -> np.ndarray:
    """``ids`` themselves; UserError for more of them than any text has: a normaliser that makes text longer."""
    if len(ids) > _OWN_TOKENS and len(ids) > _OWN_TOKENS + _TOKENS_PER_BYTE * len(text.encode(errors="replace")):
        raise UserError(
            f"the tokenizer makes {len(ids):,} tokens of {len(text):,} characters", field="tokenizer", value=name,
            accepted="a tokenizer whose files do not make texts longer",
        )  # fmt: skip
    return ids


def _fingerprint(inner: Any) -> str:
    """Hash of everything that determines ids: the whole fast tokenizer, or else the vocabulary and the class."""
    if getattr(inner, "backend_tokenizer", None) is not None:
        text = str(inner.backend_tokenizer.to_str())
    else:
        text = json.dumps([inner.__class__.__name__, sorted(inner.get_vocab().items())])
    return hashlib.sha256(text.encode()).hexdigest()
