"""Keys of tokenizer_config.json: those that transformers reads or writes are silent, others are said once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import BertTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from hetero_megatron.cli.preprocess import main
from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.errors import UserError
from tests.support.chat import TEMPLATES, chat_tokenizer

KEY = "tokenizer_config.json"


def _folders(folder: Path) -> list[Path]:
    """As transformers writes tokenizers of several classes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "[UNK]": 3, "[PAD]": 4, "[CLS]": 5, "[SEP]": 6, "[MASK]": 7, "a": 8}
    inner = Tokenizer(models.WordLevel(vocab, "<unk>"))
    made = [
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", image_token="a", max_length=7),
        BertTokenizer(vocab=vocab, do_lower_case=False, strip_accents=True),
        GPT2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[], add_prefix_space=True),
        LlamaTokenizer(vocab=vocab, merges=[], legacy=False, add_eos_token=True),
    ]
    for number, tokenizer in enumerate(made):
        tokenizer.save_pretrained(folder / str(number))
    return [chat_tokenizer(folder / "chat", TEMPLATES["chatml"]), *(folder / str(i) for i in range(len(made)))]


def _add(folder: Path, **keys: object) -> None:
    config = json.loads((folder / KEY).read_text())
    (folder / KEY).write_text(json.dumps(config | keys))


def test_what_transformers_writes_is_silent_and_other_keys_are_said(tmp_path: Path) -> None:
    folders = _folders(tmp_path)
    for folder in folders:
        _add(folder, vocab_size=49152, use_default_system_prompt=False, errors="replace")  # as SmolLM2's and others'
        assert HuggingFaceTokenizer(str(folder)).notices == (), folder
        _add(folder, add_eos_tokn=True, strip_acents=True, loud=True, off=False, none=None, voice_token="a")
        (said,) = HuggingFaceTokenizer(str(folder)).notices
        assert "add_eos_tokn (did you mean add_eos_token?)" in said and "loud" in said
        assert "off" not in said and "none" not in said and "voice" not in said
        assert ("strip_acents (did you mean strip_accents?)" in said) == (folder.name == "1")
        _add(folder, do_lower_case=True)  # which only some classes read
        (said,) = HuggingFaceTokenizer(str(folder)).notices
        assert ("do_lower_case" in said) == (folder.name != "1")


def test_a_folder_in_the_place_of_a_file_is_refused_and_one_with_a_tokenizer_is_not(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "t", TEMPLATES["chatml"])
    (folder / "tokenizer").mkdir()
    HuggingFaceTokenizer(str(folder))
    for name in (KEY, "special_tokens_map.json", "vocab.txt", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
        with pytest.raises(UserError, match=f"{name}"):
            HuggingFaceTokenizer(str(folder))
        (folder / name).rmdir()


def test_they_are_said_by_whoever_reads_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = chat_tokenizer(tmp_path / "t", TEMPLATES["chatml"])
    _add(folder, add_eos_tokn=True)
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "the quick brown fox"}) + "\n")
    words = ["--input", str(tmp_path / "d.jsonl"), "--output-prefix", str(tmp_path / "o"), "--workers", "1"]
    main([*words, "--tokenizer-model", str(folder)])
    assert capsys.readouterr().err.count("add_eos_tokn (did you mean add_eos_token?)") == 1
    lines: list[str] = []
    config = DataConfig(data_path=(str(tmp_path / "d.jsonl"),), split="1", tokenizer_type="HuggingFaceTokenizer",
                        tokenizer_model=str(folder))  # fmt: skip
    build_datasets(config, 4, 1, (1, 0, 0), log=lines.append)
    assert len([line for line in lines if "add_eos_tokn" in line]) == 1
