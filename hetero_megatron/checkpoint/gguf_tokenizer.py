"""A Hugging Face tokenizer as GGUF says it: byte-level BPE of known patterns, and SentencePiece.

Readers of GGUF split text by rules that they know by name, so a pattern without a name is refused: guessed, the file
would give other tokens than the model was trained on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetero_megatron.errors import UserError

Field = tuple[str, Any]  # a method of gguf.GGUFWriter, and its argument
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # kinds of tokens, as SentencePiece numbers them, too
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# (pattern by which text is split, whether whole words are looked up first) -> the name of both in GGUF
PATTERNS = {
    (None, False): "gpt-2",
    (_CONTRACTIONS + r"\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_CONTRACTIONS + r"\p{N}" + _REST, False): "qwen2",
    (_TEKKEN, True): "tekken",
}
_SPECIAL = {"bos_token": "add_bos_token_id", "eos_token": "add_eos_token_id", "pad_token": "add_pad_token_id",
            "unk_token": "add_unk_token_id"}  # fmt: skip


def tokenizer_fields(files: Mapping[str, bytes], vocab_size: int) -> tuple[list[Field], list[str]]:
    """(what GGUF says of the tokenizer, notices); nothing of a model that has none.

    Args:
        files: of a Hugging Face directory, by name.
        vocab_size: of the model; rows without a token are called ``[PAD0]`` and so on.

    Raises:
        UserError: it cannot be said.
    """
    settings = _object(files, "tokenizer_config.json")
    if "tokenizer.model" in files:
        fields, tokens = _sentencepiece(files, vocab_size)
    elif "tokenizer.json" in files:
        fields, tokens = _byte_level(_object(files, "tokenizer.json"), vocab_size)
    else:
        return [], ["the file has no tokenizer, as the source has none"]
    numbers = {token: number for number, token in enumerate(tokens)}
    for key, method in _SPECIAL.items():
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in numbers:
            fields.append((method, numbers[token]))
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(settings.get(key), bool):
            fields.append((f"add_{key}", settings[key]))
    template = files.get("chat_template.jinja")
    chat = template.decode("utf-8", "replace") if template is not None else settings.get("chat_template")
    if isinstance(chat, str):
        fields.append(("add_chat_template", chat))
    return fields, []


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _refused(f"{name} is no JSON object", "a tokenizer that transformers loads")
    return content


def _refused(problem: str, accepted: str) -> UserError:
    return UserError(f"its tokenizer cannot be written as GGUF: {problem}", field="SOURCE", accepted=accepted)


def _filled(tokens: Mapping[int, tuple[str, int]], vocab_size: int) -> tuple[list[str], list[int]]:
    """Tokens and their kinds by number, all that the model has rows for."""
    if max(tokens, default=0) >= vocab_size or min(tokens, default=0) < 0:
        outside_number = max(tokens, key=lambda number: (number >= vocab_size, -number))
        raise _refused(f"token {outside_number} is beyond the model's {vocab_size:,} rows", "the model's own tokenizer")
    rows = [tokens.get(number, (f"[PAD{number}]", UNUSED)) for number in range(vocab_size)]
    return [token for token, _ in rows], [kind for _, kind in rows]


def _added(entries: Any) -> Iterator[tuple[int, str, int]]:
    """Of ``added_tokens``: (number, token, kind)."""
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str):
            yield entry["id"], entry["content"], CONTROL if entry.get("special") else USER


def _byte_level(tokenizer: Mapping[str, Any], vocab_size: int) -> tuple[list[Field], list[str]]:
    """Of ``tokenizer.json``."""
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise _refused("tokenizer.json is no BPE with a vocabulary", "byte-level BPE, or a tokenizer.model")
    if model.get("byte_fallback"):
        problem = "tokenizer.json is SentencePiece's, without the scores of its pieces"
        raise _refused(problem, "a directory with tokenizer.model beside it")
    name = _pattern_name(tokenizer.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    tokens = {number: (token, NORMAL) for token, number in model["vocab"].items() if isinstance(number, int)}
    tokens |= {number: (token, kind) for number, token, kind in _added(tokenizer.get("added_tokens"))}
    texts, kinds = _filled(tokens, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    return [
        ("add_tokenizer_model", "gpt2"), ("add_tokenizer_pre", name), ("add_token_list", texts),
        ("add_token_types", kinds), *([("add_token_merges", merges)] if merges else []),
    ], texts  # fmt: skip


def _pattern_name(pre: Any, whole_words: bool) -> str:
    """What GGUF calls the way in which text is split."""
    steps: Sequence[Any] = pre.get("pretokenizers", [pre]) if isinstance(pre, dict) else []
    patterns: list[Any] = []
    for step in steps if isinstance(steps, list) else ():
        kind = step.get("type") if isinstance(step, dict) else None
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            patterns.append(step.get("pattern", {}).get("Regex"))
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            patterns += [None] if step.get("use_regex", True) else []
        else:
            patterns.append(f"a step {kind}")
    key = (patterns[0], whole_words) if len(patterns) == 1 else ("", whole_words)
    if key not in PATTERNS:
        raise _refused(f"it splits text by {str(patterns)[:120]}", f"the patterns of {', '.join(PATTERNS.values())}")
    return PATTERNS[key]


def _sentencepiece(files: Mapping[str, bytes], vocab_size: int) -> tuple[list[Field], list[str]]:
    """Of ``tokenizer.model``, and the tokens that were added to it."""
    tokens: dict[int, tuple[str, int]] = {}
    scores: dict[int, float] = {}
    try:
        for number, (text, score, kind) in enumerate(_pieces(files["tokenizer.model"])):
            tokens[number], scores[number] = (text, kind), score
    except (IndexError, ValueError, struct.error):
        raise _refused("tokenizer.model is damaged", "a SentencePiece model") from None
    if not tokens:
        raise _refused("tokenizer.model holds no pieces", "a SentencePiece model")
    for number, token, kind in _added(_object(files, "tokenizer.json").get("added_tokens")):
        if number not in tokens or tokens[number][0] != token:
            tokens[number] = (token, kind)
    texts, kinds = _filled(tokens, vocab_size)
    return [
        ("add_tokenizer_model", "llama"), ("add_tokenizer_pre", "default"), ("add_token_list", texts),
        ("add_token_scores", [scores.get(number, -1000.0) for number in range(vocab_size)]),
        ("add_token_types", kinds),
    ], texts  # fmt: skip


def _pieces(data: bytes) -> Iterator[tuple[str, float, int]]:
    """(text, score, kind) of each piece: field 1 of SentencePiece's ModelProto, whose fields 1 to 3 these are."""
    for number, value in _proto(data):
        if number != 1:
            continue
        piece = dict(_proto(value))
        (score,) = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))
        kind = piece.get(3, NORMAL)
        if not isinstance(kind, int) or not NORMAL <= kind <= BYTE:
            raise ValueError(f"a piece of kind {kind}")
        yield piece.get(1, b"").decode("utf-8"), score, kind


def _proto(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer: an int, or bytes."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        wire = key & 7
        if wire == 0:
            value, offset = _varint(data, offset)
            yield key >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire}")
        size, offset = _varint(data, offset) if wire == 2 else ((8, 4)[wire == 5], offset)
        if offset + size > len(data):
            raise ValueError("cut off")
        yield key >> 3, data[offset : offset + size]
        offset += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number, where it ends)."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number of more than 64 bits")
