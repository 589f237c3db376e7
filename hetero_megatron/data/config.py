"""Data configuration, whose fields are Megatron's flags of the same names, and the tokenizer that they ask for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from hetero_megatron.data.tokenizers import (
    MAX_ID,
    USED_BY,
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    Llama2Tokenizer,
    NullTokenizer,
    Tokenizer,
)
from hetero_megatron.errors import UserError
from hetero_megatron.spec.preference import UNPAIRED

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"  # Megatron's
DATALOADER_TYPES = ("single", "streaming")
# Short: the exact value of "1e999999999" is a fraction that fills the memory.
_NUMBER = re.compile(r"[+-]?([0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})([eE][+-]?[0-9]{1,2})?")
OVERLONG = ("keep-start", "keep-end", "drop", "refuse")  # what becomes of conversations longer than a sample


@dataclass(frozen=True)
class DataConfig:
    """``None`` means that the flag was not given.

    Attributes:
        data_path: words of --data-path: one path, several paths, or ``weight path weight path ...``.
        train_data_path, valid_data_path, test_data_path: the same, per split; not together with data_path or split.
        split: shares of the documents for training, validation and test, e.g. ``99,1,0``.
        tokenizer_type: None: the type that reads the files given; without any, ByteTokenizer for text and a small
            vocabulary (the command line prefers that of --load-hf or --model); for .bin/.idx NullTokenizer, which needs
            vocab_size.
        tokenizer_source: who chose the tokenizer, for what the run prints.
        json_keys: the key (jsonl) or column (parquet, arrow) that holds the text.
        sft: the data are conversations (see ``data.chat``).
        preference: they are preference pairs, for this loss; None: single conversations.
        grpo: they are prompts, to be answered with ``max_new_tokens`` at most.
        chat_template: file with a Jinja template; None: the tokenizer's own.
        sft_loss: ``assistant``: what the assistant wrote counts; ``all``: every token of a conversation.
        overlong_samples: what becomes of conversations longer than a sample.
        no_packing: each conversation has a sample of its own.
        shuffle_buffer: records of a stream that are shuffled together.
        dataloader_type: ``single``: packed and shuffled by global sample index; ``streaming``: read in order.
    """

    data_path: tuple[str, ...] | None = None
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    test_data_path: tuple[str, ...] | None = None
    split: str | None = None
    mock_data: bool = False
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    trust_remote_code: bool = False
    tokenizer_source: str = ""
    json_keys: str = "text"
    data_cache_path: str | None = None
    dataloader_type: str = "single"
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    num_workers: int = 2
    sft: bool = False
    preference: str | None = None
    grpo: bool = False
    max_new_tokens: int = 256
    chat_template: str | None = None
    sft_loss: str = "assistant"
    overlong_samples: str = "keep-start"
    no_packing: bool = False
    shuffle_buffer: int = 1000

    def __post_init__(self) -> None:
        tokenizer_type = choose_type(self.tokenizer_type, self.tokenizer_model, self.vocab_file, self.merge_file)
        object.__setattr__(self, "tokenizer_type", tokenizer_type)
        per_split = [f"--{s}-data-path" for s in SPLITS if self.paths_of(s)]
        if self.dataloader_type not in DATALOADER_TYPES:
            raise UserError(
                "no such loader", field="--dataloader-type", value=self.dataloader_type,
                accepted=", ".join(DATALOADER_TYPES),
            )  # fmt: skip
        if self.num_workers < 0:
            raise UserError("negative", field="--num-workers", value=self.num_workers, accepted="an integer >= 0")
        if self.split is not None:
            parse_split(self.split)  # also where nothing is split
        sources = [name for name, value in (("--mock-data", self.mock_data), ("--data-path", self.data_path)) if value]
        if len(sources) + bool(per_split) > 1:
            raise UserError(
                f"these flags exclude one another: {', '.join(sources + per_split)}", field=(sources + per_split)[-1],
                accepted="one of --mock-data, --data-path, --train-data-path (with --valid-data-path ...)",
            )  # fmt: skip
        if not sources and not per_split:
            raise UserError(
                "no data to train on", field="--data-path",
                accepted="--data-path PATH (stdlib: the built-in corpus), --train-data-path PATH or --mock-data",
            )  # fmt: skip
        if per_split and self.split is not None:
            raise UserError(f"not together with {per_split[0]}", field="--split", value=self.split)
        if self.sft:
            self._check_sft()

    def _check_sft(self) -> None:
        one_document = "a conversation is always one document: attention and positions do not cross to the next one"
        refused = {
            "--mock-data": (self.mock_data, "fine-tuning needs conversations", "--data-path"),
            "--reset-position-ids": (self.reset_position_ids, one_document, "leave the flag out"),
            "--reset-attention-mask": (self.reset_attention_mask, one_document, "leave the flag out"),
            "--eod-mask-loss": (self.eod_mask_loss, "what counts is decided by --sft-loss", "leave the flag out"),
        }
        for flag, (is_given, problem, accepted) in refused.items():
            if is_given:
                raise UserError(problem, field=flag, value="given", accepted=accepted, where="with --sft")
        if self.grpo and self.reads_stream:
            raise UserError(
                "prompts are addressed by number, which a stream has not", field="--dataloader-type",
                value="streaming", accepted="single", where="with --grpo",
            )  # fmt: skip
        if self.pairs and self.reads_stream:
            raise UserError(
                "pairs are addressed by number, which a stream has not", field="--dataloader-type", value="streaming",
                accepted="single", where="with --preference",
            )  # fmt: skip
        if self.pairs and self.sft_loss == "all":
            raise UserError(
                "a pair is compared by its answers alone", field="--sft-loss", value="all", accepted="assistant",
                where="with --preference",
            )  # fmt: skip

    @property
    def pairs(self) -> bool:
        """Whether the records are preference pairs, or labelled answers."""
        return self.preference is not None

    @property
    def items(self) -> str:
        """What a record holds: a pair, an example (an answer with a label), or a conversation."""
        return "example" if self.preference in UNPAIRED else "pair" if self.pairs else "conversation"

    @property
    def reads_stream(self) -> bool:
        """Whether samples come from reading front to back."""
        return self.dataloader_type == "streaming" and not self.mock_data

    def paths_of(self, split: str) -> tuple[str, ...] | None:
        """Words of --train-data-path and so on."""
        return {"train": self.train_data_path, "valid": self.valid_data_path, "test": self.test_data_path}[split]


def parse_split(text: str, field: str = "--split") -> tuple[Fraction, Fraction, Fraction]:
    """Shares of train, valid and test with sum 1, from one to three numbers; missing ones are 0."""
    accepted = "one to three numbers >= 0 for train,valid,test, not all 0, e.g. 99,1,0"
    numerals = [numeral.strip() for numeral in text.replace("/", ",").split(",")]
    if not all(map(_NUMBER.fullmatch, numerals)):
        raise UserError("not a list of numbers", field=field, value=text, accepted=accepted)
    numbers = [Fraction(numeral) for numeral in numerals]
    if len(numbers) > 3 or any(n < 0 for n in numbers) or not sum(numbers):
        raise UserError("cannot be used as shares", field=field, value=text, accepted=accepted)
    shares = [n / sum(numbers) for n in [*numbers, Fraction(0), Fraction(0)][:3]]
    return shares[0], shares[1], shares[2]


def split_documents(count: int, shares: tuple[Fraction, Fraction, Fraction]) -> list[tuple[int, int]]:
    """Half-open ranges of documents: consecutive, cut at the rounded cumulative shares."""
    cuts = [0] + [round(count * sum(shares[: i + 1], Fraction(0))) for i in range(3)]
    return list(zip(cuts, cuts[1:]))


def parse_blend(words: tuple[str, ...], field: str = "--data-path") -> tuple[list[str], list[float] | None]:
    """(paths, weights): ``p``, ``p1 p2 ...`` (weights None: by size) or ``w1 p1 w2 p2 ...``."""
    numbers = [_number(word) for word in words]
    flag_text, accepted = " ".join(words), "PATH, or WEIGHT PATH WEIGHT PATH ..."
    if len(words) == 1 or all(n is None for n in numbers):
        return list(words), None
    if len(words) % 2 or any((n is None) == (i % 2 == 0) for i, n in enumerate(numbers)):
        raise UserError("weights and paths do not alternate", field=field, value=flag_text, accepted=accepted)
    weights = [n for n in numbers[::2] if n is not None]
    for weight in weights:
        if not math.isfinite(weight) or weight <= 0:
            raise UserError(f"weight {weight:g} is not positive", field=field, value=flag_text, accepted="weights > 0")
    return list(words[1::2]), weights


def _number(word: str) -> float | None:
    return float(word) if _NUMBER.fullmatch(word) else None

TOKENIZER_TYPES = (
    "ByteTokenizer", "NullTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer", "Llama2Tokenizer",
)  # fmt: skip
_HUGGING_FACE = "--tokenizer-type HuggingFaceTokenizer with a directory or name of the same tokenizer"
_REFUSED = {  # Megatron's names that this version does not read, and what to use instead
    "SentencePieceTokenizer": _HUGGING_FACE,
    "GPTSentencePieceTokenizer": _HUGGING_FACE,
    "TikTokenizer": _HUGGING_FACE,
    "NullMultimodalTokenizer": "--tokenizer-type NullTokenizer",
    "MultimodalTokenizer": "a text tokenizer: this version trains on text only",
    "SFTTokenizer": "--tokenizer-type HuggingFaceTokenizer with --sft: the tokenizer's chat template is used",
    "BertWordPieceLowerCase": "a tokenizer of a GPT model: this version trains no BERT",
    "BertWordPieceCase": "a tokenizer of a GPT model: this version trains no BERT",
}


def choose_type(
    type: str | None, model: str | None, vocab_file: str | None, merge_file: str | None
) -> str | None:
    """The tokenizer type: the given one, or the one that reads the given files, as in Megatron.

    Returns:
        None if neither a type nor a file is given.

    Raises:
        UserError: no single type reads the given files.
    """
    if type is not None:
        return type
    files = [name for name, value in (("--vocab-file", vocab_file), ("--merge-file", merge_file)) if value]
    if model and files:
        raise UserError(
            f"beside {' and '.join(files)}: these are two tokenizers", field="--tokenizer-model", value=model,
            accepted="one of the two, or --tokenizer-type to say which one is meant",
        )  # fmt: skip
    return "HuggingFaceTokenizer" if model else "GPT2BPETokenizer" if files else None


def build_tokenizer(
    type: str,
    model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """The tokenizer for Megatron's flags of these names.

    Raises:
        UserError: a required flag is missing, or one is given that the type does not use; damaged files.
    """
    flag_values = {"--tokenizer-model": model, "--vocab-file": vocab_file, "--merge-file": merge_file,
             "--trust-remote-code": trust_remote_code}  # fmt: skip
    for flag, value in flag_values.items():
        if value and type in TOKENIZER_TYPES and type not in USED_BY[flag]:
            raise UserError(
                f"{type} does not read it", field=flag, value=value,
                accepted=f"--tokenizer-type {USED_BY[flag][0]}, or leave the flag out",
            )  # fmt: skip
    if type == "ByteTokenizer":
        return ByteTokenizer()
    if type == "NullTokenizer":
        if vocab_size is None or not 1 <= vocab_size <= MAX_ID:
            raise UserError(
                "NullTokenizer needs to know how many ids there are", field="--vocab-size", value=vocab_size,
                accepted=f"an integer from 1 to {MAX_ID:,}",
            )  # fmt: skip
        return NullTokenizer(vocab_size)
    if type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(_needed("--tokenizer-model", model, type), trust_remote_code)
    if type == "Llama2Tokenizer":
        return Llama2Tokenizer(_needed("--tokenizer-model", model, type))
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
