"""What a run saves beside its weights (configuration, tokenizer, other files): as where the weights came from had it,
and the tokenizer that it trains with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hetero_megatron.checkpoint.model_files import CONFIG, GENERATION, ModelFiles, from_directory
from hetero_megatron.checkpoint.native import Checkpoint
from hetero_megatron.data import Datasets, reads_text
from hetero_megatron.data.tokenizers import ByteTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer
from hetero_megatron.errors import UserError
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_export import export_config
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.files import read_bytes
from hetero_megatron.utils.text import notice_line

_END = "<|endoftext|>"


def run_model_files(
    config: RunConfig, data: Datasets, checkpoint: Checkpoint | None, log: Callable[[str], None]
) -> ModelFiles:
    """For --save and --save-hf; on the rank that writes them, which sees all directories that are named.

    Later ones of these replace earlier ones: the directory of --model, that of --load-hf, the checkpoint, and the
    tokenizer that the run trains with (bytes have no files: then none travels). Where none of them brought weights with
    a config.json, token ids are the tokenizer's.

    Args:
        checkpoint: that the weights are from.
    """
    files = ModelFiles()
    for directory in dict.fromkeys((config.model_directory, config.load_hf)):
        if directory is not None:
            files = from_directory(directory).over(files)
    carried = checkpoint.model_files() if checkpoint is not None else ModelFiles()
    files = carried.over(files)
    tokenizer_files = files.tokenizer().files
    if _trains_on_bytes(config, data):
        files = files.without_tokenizer("this run trains on bytes")
    else:
        files = _tokenizer(config, data).over(files)
    if config.load_hf is None and CONFIG not in carried.files:
        replaced = files.tokenizer().files != tokenizer_files
        keeps_config = bool(tokenizer_files) and not replaced  # the source's config.json says what its tokens mean
        files = _from_scratch(files, config.spec, {} if keeps_config else special_ids(config, data), replaced)
    for notice in dict.fromkeys(files.notices):
        log(notice_line(notice))
    return files


def special_ids(config: RunConfig, data: Datasets) -> dict[str, int | None]:
    """Of the tokenizer that the data are read with; empty where nobody said which one that is."""
    flags, tokenizer = config.data, data.tokenizer
    if flags is None or (flags.tokenizer_type is None and not reads_text(flags)):
        return {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        ids = tokenizer.special_ids()
    else:
        begin = tokenizer.eod if isinstance(tokenizer, GPT2BPETokenizer) else None
        ids = {"bos_token_id": begin, "eos_token_id": tokenizer.eod, "pad_token_id": None}
    rows = config.spec.vocab_size
    return {key: value if value is not None and 0 <= value < rows else None for key, value in ids.items()}


def _from_scratch(along: ModelFiles, spec: ModelSpec, ids: dict[str, int | None], replaced: bool) -> ModelFiles:
    """A config.json that says what the tokenizer's special tokens are; ``replaced``: it is not the source's."""
    files = dict(along.files)
    if replaced:
        files.pop(GENERATION, None)  # it names ids of the other tokenizer
    with suppress(UserError):  # no Hugging Face family has this model: it can be saved, not exported
        content = json.dumps(export_config(spec, along.config) | ids, indent=2) + "\n"
        files[CONFIG] = content.encode()
    return ModelFiles(files, along.notices)


def _trains_on_bytes(config: RunConfig, data: Datasets) -> bool:
    mock = config.data is None or config.data.mock_data
    return isinstance(data.tokenizer, ByteTokenizer) and not mock and not config.skip_train


def _tokenizer(config: RunConfig, data: Datasets) -> ModelFiles:
    """The files of the tokenizer that the data are read with; none where that is not known (mock data, token ids)."""
    flags = config.data
    if flags is None:
        return ModelFiles()
    if isinstance(data.tokenizer, GPT2BPETokenizer):
        files = {"vocab.json": flags.vocab_file, "merges.txt": flags.merge_file}
        tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)
        described = json.dumps({"tokenizer_class": "GPT2Tokenizer", **tokens}, indent=2) + "\n"
        contents = {name: read_bytes(path) for name, path in files.items() if path is not None}
        tokenizer_json = data.tokenizer.to_json().encode()  # for families whose tokenizer class reads no pair of files
        return ModelFiles({**contents, "tokenizer.json": tokenizer_json, "tokenizer_config.json": described.encode()})
    if not isinstance(data.tokenizer, HuggingFaceTokenizer) or flags.tokenizer_model is None:
        return ModelFiles()
    directory = Path(flags.tokenizer_model).expanduser()
    if directory.is_dir() and (tokenizer := from_directory(directory).tokenizer()).files:
        return tokenizer
    with tempfile.TemporaryDirectory() as folder:  # by its name on the hub, or of other files: as transformers has it
        data.tokenizer.save(folder)
        return from_directory(folder).tokenizer()
