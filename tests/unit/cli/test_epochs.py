"""--epochs: steps that go through the conversations so often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.errors import UserError
from tests.support.chat import TEMPLATES, chat_tokenizer, turns


def test_epochs_are_steps_by_the_number_of_samples(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "t", TEMPLATES["chatml"])
    data = tmp_path / "c.jsonl"
    data.write_text("".join(json.dumps({"messages": turns("a", f"{i}")}) + "\n" for i in range(30)))
    words = [
        "--sft", "--data-path", str(data), "--split", "1", "--tokenizer-model", str(folder), "--seq-length", "64",
        "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3", "--num-layers", "1", "--hidden-size",
        "16", "--num-attention-heads", "2", "--no-packing",
    ]  # fmt: skip
    for epochs, steps in (("1", 8), ("2", 15), ("0.4", 3), ("4", 30), ("0.001", 1)):
        config = configure([*words, "--epochs", epochs, "--lr-warmup-iters", "1"] if steps > 1 else
                           [*words, "--epochs", epochs], {"WORLD_SIZE": "1"})  # fmt: skip
        assert config.steps == steps and config.train_samples == 4 * steps
        assert any(f"--epochs {epochs}: 30 samples each" in notice for notice in config.notices)
    for more, says in (
        (["--epochs", "1", "--train-iters", "3"], "two lengths"), (["--epochs", "0"], "--epochs"), ([], "or --epochs"),
        (["--epochs", "nan"], "--epochs"), (["--epochs", "1", "--dataloader-type", "streaming"], "no known length"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            configure([*words, *more], {"WORLD_SIZE": "1"})
    with pytest.raises(UserError, match="a blend"):
        blend = [str(data) if word == str(data) else word for word in words]
        blend[3:3] = [str(data)]
        configure([*blend, "--epochs", "1"], {"WORLD_SIZE": "1"})
