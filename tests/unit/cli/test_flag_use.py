"""Flags that are given and have no effect, bounds of numbers, and what the run says about its tokenizer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_megatron import __version__
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.flags.flag import SUPPORTED
from hetero_megatron.cli.flags.help import help_text
from hetero_megatron.cli.flags.parse import index
from hetero_megatron.cli.flags.table import ALL
from hetero_megatron.cli.main import main as hetero_megatron
from hetero_megatron.cli.pretrain import main as pretrain
from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import RunConfig
from tests.support.paths import ROOT

BASE = "--seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
TINY = f"--model tiny --mock-data {BASE}"


def config(line: str) -> RunConfig:
    return configure(line.split(), {"WORLD_SIZE": "1"})


def refusal(line: str) -> UserError:
    with pytest.raises(UserError) as caught:
        config(line)
    return caught.value


UNUSED = [
    ("--save-interval 5", "--save"),
    ("--keep-checkpoints 2 --save d --save-retain-interval 4 --ckpt-step 3", "--load"),
    ("--finetune", "--load"),
    ("--override-opt_param-scheduler", "--load"),
    ("--save-hf-dtype bf16", "--save-hf"),
    ("--vocab-file v.json --tokenizer-type ByteTokenizer", "--tokenizer-type GPT2BPETokenizer"),
    ("--merge-file m.txt --tokenizer-type NullTokenizer --vocab-size 99", "--tokenizer-type GPT2BPETokenizer"),
    ("--tokenizer-model d --tokenizer-type ByteTokenizer", "--tokenizer-type HuggingFaceTokenizer"),
    ("--trust-remote-code", "--tokenizer-type HuggingFaceTokenizer"),
    ("--json-keys body", "a *.jsonl, *.parquet or *.arrow corpus"),
    ("--eval-iters 5", "--eval-interval or --skip-train"),
    ("--lr-decay-style constant --min-lr 1e-4", "a learning rate that decays"),
    ("--lr-wsd-decay-style linear", "--lr-decay-style WSD"),
    ("--lr-warmup-init 1e-5", "--lr-warmup-iters"),
    ("--optimizer sgd --adam-beta1 0.8", "--optimizer adam"),
    ("--sgd-momentum 0.5", "--optimizer sgd"),
    ("--fp16 --loss-scale 8 --hysteresis 3", "a dynamic loss scale"),
    ("--recompute-modules core_attn", "--recompute-granularity selective"),
    ("--hierarchical-context-parallel-sizes 2 2", "context parallelism"),
    ("--tensorboard-queue-size 5", "--tensorboard-dir"),
    ("--tensorboard-dir d --log-validation-ppl-to-tensorboard", "--eval-interval"),
    ("--wandb-exp-name n", "--wandb-project"),
    ("--compile-backend eager", "--compile"),
    ("--align-steps 3", "--dump-layers"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "without"), UNUSED, ids=[words for words, _ in UNUSED])
def test_a_flag_that_is_given_and_not_used_is_an_error(words: str, without: str) -> None:
    error = refusal(f"{TINY} {words}")
    assert f"has no effect without {without}" in str(error) and error.field.split()[0] in words
    assert f"{without}" in error.accepted


def test_all_unused_flags_stand_in_one_message() -> None:
    message = str(refusal(f"{TINY} --save-interval 5 --keep-checkpoints 2 --wandb-entity e"))
    assert "3 flags cannot be taken" in message
    assert "--save-interval = 5, --keep-checkpoints = 2: has no effect without --save" in message
    assert "--wandb-entity = e: has no effect without --wandb-project" in message


def test_what_launch_lines_repeat_is_one_notice() -> None:
    line = f"{TINY} --bf16 --initial-loss-scale 65536 --hysteresis 2 --split 99,1,0 --eval-interval 10 --eval-iters 0"
    (block,) = [n for n in config(f"{line} --use-mcore-models --use-flash-attn").notices if "no effect" in n]
    assert block.splitlines()[0] == "6 flags have no effect here"
    assert "    --initial-loss-scale, --hysteresis: without --dtype fp16 there is nothing for it to change" in block


def test_conditions_name_flags_and_values_that_exist() -> None:
    flags, facts = index(), {
        "data files", "a *.jsonl, *.parquet or *.arrow corpus", "a learning rate that decays", "a dynamic loss scale",
        "context parallelism", "pipeline parallelism",
    }  # fmt: skip
    for flag in ALL:
        assert not flag.needs or flag.status == SUPPORTED, flag.name
        for condition in (c for need in flag.needs for c in need.any_of):
            name, _, value = condition.partition(" ")
            if name.startswith("--"):
                choices = flags[name].choices
                assert not value or not choices or value in map(str, choices), condition
            else:
                assert condition in facts, condition


# Tokenizers


def test_the_files_given_choose_the_tokenizer(tmp_path: Path) -> None:
    line = f"--model gpt2 --data-path corpus.jsonl {BASE}"
    by_model = config(f"{line} --tokenizer-model {tmp_path}").data
    by_files = config(f"{line} --vocab-file v.json --merge-file m.txt").data
    assert by_model is not None and by_model.tokenizer_type == "HuggingFaceTokenizer"
    assert by_files is not None and by_files.tokenizer_type == "GPT2BPETokenizer"
    assert by_model.tokenizer_source == "--tokenizer-model"
    assert by_files.tokenizer_source == "--vocab-file, --merge-file"
    assert "these are two tokenizers" in str(refusal(f"{line} --tokenizer-model {tmp_path} --vocab-file v.json"))


@pytest.mark.parametrize("model", ["--model gpt2", "--model llama2-7b", "{flags} --vocab-size 1024"])
def test_bytes_for_a_large_vocabulary_are_refused_unless_asked_for(model: str) -> None:
    line = f"{model.format(flags='--num-layers 2 --hidden-size 64 --num-attention-heads 4')} --data-path stdlib {BASE}"
    error = refusal(line)
    assert error.field == "--tokenizer-type" and "read byte by byte" in str(error) and "ByteTokenizer" in error.accepted
    assert config(f"{line} --tokenizer-type ByteTokenizer").data is not None
    assert config(line.replace("stdlib", "stdlib --dry-run").replace("--data-path stdlib", "")).data is None


def test_vocab_size_beside_a_model_is_the_models_or_that_of_a_null_tokenizer() -> None:
    line = f"--model tiny --data-path stdlib {BASE}"
    assert "--model tiny says 257" in str(refusal(f"{line} --vocab-size 300"))
    assert config(f"{line} --vocab-size 257").spec.vocab_size == 257
    assert config(f"{line} --vocab-size 100 --tokenizer-type NullTokenizer").spec.vocab_size == 257


def test_the_run_prints_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    said: list[str] = []
    text = DataConfig(data_path=(str(tmp_path / "a.txt"),), split="1")
    build_datasets(text, 16, 1, (1, 0, 0), 300, said.append)
    assert said[0] == "data: tokenizer ByteTokenizer (by default): ids 0 to 256, 256 ends a document"
    build_datasets(DataConfig(mock_data=True), 16, 1, (1, 0, 0), 300, said.append)
    assert any(line.startswith("data: tokenizer NullTokenizer (by default): ids 0 to 299") for line in said)


# Numbers


@pytest.mark.parametrize(
    "words",
    [
        "--train-iters 9223372036854775807", "--global-batch-size 9000000000000000000 --dry-run",
        "--seed 9" + "9" * 5000,
        "--num-layers 100001", "--vocab-size 4294967296", "--log-interval 1_000", "--num-workers ٣", "--lr infinity",
        "--distributed-timeout-minutes 1e300", "--hetero-process-meshes 1 1 1 99999999 1", "--split 1e999999999",
        "--recompute-method-per-stage-micro-batch [[1,99999999999999999999]]", "--save " + "x" * 5000, "--save a\0b",
        "--exit-interval -1", "--max-logits-mib 99999999999", "--save \udcff",
    ],
    ids=lambda words: ascii(words[:40]),
)  # fmt: skip
def test_numbers_and_words_have_bounds(words: str) -> None:
    name, *values = words.split(" ")
    with pytest.raises(UserError) as caught:
        configure([*TINY.split(), name, *values], {})
    message = str(caught.value)
    assert name in message and len(message) < 400
    message.encode()  # printable


def test_every_number_has_an_upper_bound() -> None:
    from_text = {"--world-size"}  # 1 to 65,536, with the number of ranks that were started
    open_ended = [f.name for f in ALL if f.type is int and f.status == SUPPORTED and f.most is None and not f.choices]
    assert set(open_ended) <= from_text


def test_a_ramp_of_many_steps_is_counted_at_once() -> None:
    line = f"--model tiny --mock-data {BASE.replace('--train-iters 10', '--train-samples 1000000000000')}"
    got = config(f"{line} --global-batch-size 1024 --rampup-batch-size 2 2 1000000000000")
    sizes, samples = got.batch_size.sizes(), got.train_samples
    assert samples / 1024 < got.steps < samples / 2 and sizes[0] == 2 and 10**12 - samples < 1024


# As users see it


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["--version"], {}) == 0 and hetero_megatron(["--version"]) == 0
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--version"]
    said = capsys.readouterr().out + subprocess.run(tool, capture_output=True, text=True, timeout=60).stdout
    assert said == f"Hetero-Megatron {__version__}\n" * 3
    assert "--tokenizer-type" in help_text() and "GPT2BPETokenizer" in help_text()


def test_dtypes_have_all_their_usual_names() -> None:
    for name in ("fp32", "float32", "torch.float32"):
        assert config(f"{TINY} --dtype {name}").dtype == "fp32"
    assert config(f"{TINY} --dtype bfloat16 --save-hf d --save-hf-dtype float16").save_hf_dtype == "fp16"
    assert "--dtype" in str(refusal(f"{TINY} --dtype float8"))


def test_real_flags_of_megatron_are_not_unknown() -> None:
    for words in ("--fp8-param-gather", "--q-lora-rank 8", "--muon-momentum 0.9", "--kv-lora-rank 8", "--img-h 224"):
        assert not re.search("unknown flag", str(refusal(f"{TINY} {words}")))
    config(f"{TINY} --async-strategy nvrx --disable-gloo-process-groups --flight-recorder-dump-path d")


def test_a_config_in_another_vocabulary(tmp_path: Path) -> None:
    """Text for a model directory without tokenizer, read byte by byte because its vocabulary is small."""
    from tests.support.small_plans import LLAMA

    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 32_000}))
    assert "byte by byte" in str(refusal(f"--load-hf {tmp_path} --data-path stdlib {BASE}"))
