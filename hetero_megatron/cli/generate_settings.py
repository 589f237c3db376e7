"""What ends an answer and changes its tokens, as transformers finds it: generation_config.json beside the weights, or
config.json where there is none; in a Hugging Face directory or in a native checkpoint."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_megatron.checkpoint.model_files import CONFIG, GENERATION
from hetero_megatron.errors import UserError
from hetero_megatron.generation.settings import KEYS, Filters, ScoreSettings, notices, read_settings
from hetero_megatron.utils.files import parse_json, read_bytes

if TYPE_CHECKING:
    from hetero_megatron.checkpoint.native import Checkpoint
    from hetero_megatron.data.tokenizers import HuggingFaceTokenizer


@dataclass(frozen=True)
class Ending:
    """How answers are made and end.

    Attributes:
        ends: ids that end an answer.
        stops: whether a prompt with its answer ends with a text that stops it; None: no text does.
    """

    settings: ScoreSettings
    ends: tuple[int, ...]
    stops: Callable[[list[int]], bool] | None
    notices: tuple[str, ...]


def find_settings(
    args: Namespace, source: str, checkpoint: Checkpoint | None, tokenizer: HuggingFaceTokenizer, vocabulary: int
) -> Ending:
    """By the flags, and by what is beside the weights.

    Args:
        source: the Hugging Face directory, or the directory of the checkpoint; vocabulary: ids of the model.

    Raises:
        UserError: the file says what is not supported.
    """
    stored, origin = _generation_entries(source, checkpoint)
    messages = notices(stored, origin, args.temperature) if Path(origin).name == GENERATION else []
    if args.ignore_generation_config:
        stored, messages = {key: stored[key] for key in ("eos_token_id",) if key in stored}, []
    settings = read_settings(stored, vocabulary, origin, bool(args.temperature))
    if args.ignore_eos:
        return Ending(replace(settings, ends=(), stop_strings=()), (), None, tuple(messages))
    ends, tokenizer_end = settings.ends, tokenizer.eod
    if ends is None:
        ends = () if tokenizer_end is None else (tokenizer_end,)
    elif tokenizer_end is not None and tokenizer_end not in ends:
        messages.append(
            f"the tokenizer's end, id {tokenizer_end}, ends no answer, as in transformers: {origin} says eos_token_id "
            f"{stored['eos_token_id']}"
        )
    stops = tokenizer.stops_at(settings.stop_strings) if settings.stop_strings else None
    return Ending(settings, ends, stops, tuple(messages))


def filters_of(args: Namespace, settings: ScoreSettings) -> Filters:
    """What draws are from: the flags count before the file."""
    filters = settings.filters
    if args.top_p is not None:
        filters = replace(filters, top_p=args.top_p if args.top_p < 1 else None)
    return filters if args.top_k is None else replace(filters, top_k=args.top_k or None)


def _generation_entries(source: str, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], str]:
    """(settings by name, the file that has them)."""
    files = {} if checkpoint is None else checkpoint.model_files().files
    for get, place in ((files.get, checkpoint.path if checkpoint is not None else None), (_file(source), Path(source))):
        for name in (GENERATION, CONFIG):
            content = get(name) if place is not None else None
            if content is None:
                continue
            path = str(place / name) if place is not None else name
            content_read = parse_json(content, path)
            if not isinstance(content_read, dict):
                raise UserError("not a JSON object", where=path, accepted='{"eos_token_id": ...}')
            return (content_read if name == GENERATION else _of_model(content_read)), path
    return {}, GENERATION


def _file(directory: str) -> Callable[[str], bytes | None]:
    def get(name: str) -> bytes | None:
        path = Path(directory) / name
        return read_bytes(path) if path.is_file() else None

    return get


def _of_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of generation among the keys of config.json; those of its language model count where it has none."""
    inner = config.get("text_config")
    parts = (inner if isinstance(inner, dict) else {}, config)
    accepted_keys = KEYS.accepted_keys
    return {key: value for part in parts for key, value in part.items() if key in accepted_keys and value is not None}
