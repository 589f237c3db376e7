"""Which ids end an answer, and which settings count: as transformers finds them in a directory; as in a checkpoint."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hetero_megatron.checkpoint.model_files import from_directory
from hetero_megatron.cli.generate_settings import filters_of, find_settings
from hetero_megatron.generation.settings import Filters

OWN = 3  # the tokenizer's end
CASES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"eos_token_id": 5}, None), ({"eos_token_id": [5, 6]}, None), ({"eos_token_id": [OWN, 6]}, None),
    ({"eos_token_id": [5, 6], "repetition_penalty": 1.3, "num_beams": 1}, None), ({}, None),
    ({"eos_token_id": None}, None),
    ({"text_config": {"eos_token_id": 9}}, None), ({"text_config": {"eos_token_id": 9}, "eos_token_id": 8}, None),
    ({"eos_token_id": 5}, {"eos_token_id": 7}), ({"eos_token_id": 5}, {"eos_token_id": [7, OWN]}),
    ({"eos_token_id": 5, "repetition_penalty": 1.3}, {"eos_token_id": 8}), ({"eos_token_id": 5}, {}),
    ({"eos_token_id": 5}, {"pad_token_id": 0}), ({"eos_token_id": 5}, {"eos_token_id": None}),
    ({"eos_token_id": 5}, {"_from_model_config": True, "eos_token_id": 8}), ({}, {"eos_token_id": [9, 900, -1]}),
]  # fmt: skip


class Tokenizer:
    eod = OWN


class Checkpoint:
    """Of a native checkpoint, what accompanies its weights."""

    def __init__(self, folder: Path) -> None:
        self.path, self._found = folder, from_directory(folder)

    def model_files(self) -> Any:
        return self._found


def flags(**given: Any) -> Namespace:
    plain = {"ignore_eos": False, "ignore_generation_config": False, "temperature": None, "top_p": None, "top_k": None}
    return Namespace(**plain | given)


def find(folder: Path, checkpoint: Any = None, **given: Any) -> Any:
    return find_settings(flags(**given), str(folder), checkpoint, Tokenizer(), 32)  # type: ignore[arg-type]


def test_ends_are_those_that_transformers_finds(tmp_path: Path) -> None:
    for config, said in CASES:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        if said is not None:
            (folder / "generation_config.json").write_text(json.dumps(said))
            theirs = GenerationConfig.from_pretrained(folder)
        else:
            theirs = GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
        wanted = theirs.eos_token_id
        ends = (OWN,) if wanted is None else tuple(wanted) if isinstance(wanted, list) else (wanted,)
        for found in (find(folder), find(tmp_path / "none", Checkpoint(folder))):
            assert found.ends == ends, (config, said)
            assert found.settings.repetition_penalty == (theirs.repetition_penalty or 1.0)
            assert bool(found.notices) == (OWN not in ends)
        assert find(folder, ignore_eos=True).ends == ()
        plain = find(folder, ignore_generation_config=True)
        assert plain.ends == ends and not plain.settings.changes_scores


def test_without_any_file_the_tokenizers_end_counts(tmp_path: Path) -> None:
    assert find(tmp_path).ends == (OWN,) and not find(tmp_path).notices


def test_a_checkpoint_counts_before_the_directory_of_its_base(tmp_path: Path) -> None:
    for name, end in (("base", 5), ("checkpoint", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    assert find(tmp_path / "base", Checkpoint(tmp_path / "checkpoint")).ends == (6,)


def test_flags_of_draws_count_before_the_file(tmp_path: Path) -> None:
    said = {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    for given, wanted in (
        ({}, Filters(top_k=20, top_p=0.8, min_p=0.1)), ({"top_p": 1.0}, Filters(top_k=20, min_p=0.1)),
        ({"top_k": 0, "top_p": 0.5}, Filters(top_p=0.5, min_p=0.1)),
        ({"top_k": 3}, Filters(top_k=3, top_p=0.8, min_p=0.1)), ({"ignore_generation_config": True}, Filters()),
    ):  # fmt: skip
        args = flags(temperature=0.7, **given)
        assert filters_of(args, find(tmp_path, **vars(args)).settings) == wanted
    assert any("do_sample" in told for told in find(tmp_path).notices)
