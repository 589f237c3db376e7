"""Flags of pretrain_gpt.py: the table is complete, real launch lines are understood, bad words end in one message."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.flags.flag import NOTICE, REFUSED, SUPPORTED
from hetero_megatron.cli.flags.help import help_text, markdown
from hetero_megatron.cli.flags.parse import index
from hetero_megatron.cli.flags.table import ALL, GROUPS
from hetero_megatron.errors import UserError
from hetero_megatron.plans import supports
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.config import RunConfig
from tests.support.paths import FIXTURES, ROOT
from tests.support.refusals import refused

LINES = sorted((FIXTURES / "launch_lines").glob("*.sh"))
PLAN = str(ROOT / "examples" / "plans" / "demo.yaml")

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --max-position-embeddings 64"
RUN = "--mock-data --train-iters 10 --lr 1e-3"
SIZES = "--seq-length 64 --micro-batch-size 2"
TINY = f"--model tiny {RUN} {SIZES}"
FLAGS = f"{MODEL} {RUN} {SIZES}"
FILE = f"--model tiny {RUN} --plan {PLAN}"


def config(words: str, ranks: int = 1, **environment: str) -> RunConfig:
    return configure(shlex.split(words), {"WORLD_SIZE": str(ranks), **environment})


# The table


def megatron_names() -> list[str]:
    return (FIXTURES / "megatron_flags.txt").read_text().split()


def test_every_flag_of_the_research_stands_in_the_table_once() -> None:
    names = [name for flag in ALL for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))
    assert len(set(megatron_names())) == len(megatron_names()) > 200
    assert set(megatron_names()) - set(names) == set()


def test_table_is_well_formed() -> None:
    assert sum(map(len, GROUPS.values())) == len(ALL)
    for flag in ALL:
        assert re.fullmatch(r"--[a-z0-9][a-z0-9_-]+", flag.name), flag.name
        assert flag.status in (SUPPORTED, NOTICE, REFUSED) and flag.help, flag.name
        assert bool(flag.remedy) or flag.status != REFUSED, flag.name
        assert flag.status == SUPPORTED or flag.default is None, flag.name
        assert not flag.choices or flag.default is None or flag.default in flag.choices, flag.name
    assert len({flag.key for flag in ALL}) == len(ALL)


def test_document_is_current() -> None:
    written = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert written == markdown(), "run: python -m hetero_megatron.cli.flags --markdown > docs/flags.md"
    for flag in ALL:
        assert written.count(f"| `{flag.name}`") == 1 + bool(flag.differs)


def test_help_names_every_supported_flag() -> None:
    text = help_text()
    assert [f.name for f in ALL if f.status == SUPPORTED and not f.remedy and f"  {f.name}" not in text] == []
    assert max(map(len, text.splitlines())) <= 120


def test_a_flag_with_an_effect_is_read_by_somebody() -> None:
    """No supported flag silently does nothing: its key occurs in the code that builds the configuration."""
    package = ROOT / "hetero_megatron"
    files = [*(package / "cli").rglob("*.py"), package / "data" / "config.py", package / "spec" / "grpo.py"]
    code = "\n".join(file.read_text() for file in files if file.parent.name != "table")
    kinds = ("lr_decay", "lr_warmup", "lr_wsd_decay")  # their names are put together there
    words = {*re.findall(r"\w+", code), *(f"{kind}_{unit}" for kind in kinds for unit in ("iters", "samples"))}
    effective = [f for f in ALL if f.status == SUPPORTED and not f.remedy and not f.says]
    assert [f.name for f in effective if f.key not in words] == []


# What is understood


def test_defaults() -> None:
    c = config(TINY)
    assert (c.spec.name, c.plan.world_size, c.dtype, c.seed, c.steps) == ("tiny", 1, "fp32", 1234, 10)
    assert (c.plan.global_batch_size, c.plan.seq_length, c.batch_size.final, c.train_samples) == (2, 64, 2, 20)
    assert (c.optimizer.name, c.optimizer.beta2, c.optimizer.eps, c.optimizer.clip_grad) == ("adam", 0.999, 1e-8, 1.0)
    assert (c.learning_rate.style, c.learning_rate.peak, c.learning_rate.decay) == ("linear", 1e-3, 20)
    assert c.weight_decay.at(0) == 0.01 and c.evaluation.iterations == 0 and c.loss_scale.scale == 1.0
    assert c.distributed.timeout_minutes == 10 and c.logging.interval == 100 and c.data is not None
    assert c.data.mock_data and c.check_nan and not c.dry_run and c.notices == ()


def test_both_spellings_lists_and_the_last_of_two() -> None:
    tiny = TINY.replace("--mock-data", "--data-path 0.3 a 0.7 b")
    c = config(f"{tiny} --lr=2e-3 --split=99,1,0 --seed -0 --seed=7")
    assert c.data is not None and c.data.data_path == ("0.3", "a", "0.7", "b") and c.data.split == "99,1,0"
    assert c.learning_rate.peak == 2e-3 and c.seed == 7
    assert sum("stands twice" in text for text in c.notices) == 2


def test_plan_from_file_and_agreeing_flags() -> None:
    c = config(f"{FILE} --seq-length 256 --global-batch-size 16 --num-layers 6 --swiglu --hidden-size 128", ranks=4)
    assert c.plan.world_size == 4 and len(c.plan.pipelines) == 2 and c.steps == 10 and c.train_samples == 160


def test_plan_from_flagscale_flags() -> None:
    words = (
        f"{FLAGS} --enable-hetero --hetero-device-types A100 BI150 --hetero-current-device-type BI150 "
        "--hetero-process-meshes 1 1 1 2 1 2 1 1 1 1 --hetero-pipeline-layer-split 3 1 "
        "--pipeline-model-parallel-size 2 "
        "--recompute-granularity-per-stage-micro-batch '[[1, 1, 1], [1, 1, 0]]'"
    )
    c = config(words, ranks=4, RANK="3")
    (pipeline,) = c.plan.pipelines
    assert [stage.chip for stage in pipeline.stages] == ["A100", "BI150"]
    assert [str(stage.recompute) for stage in pipeline.stages] == ["full", "none"]
    with refused("--hetero-current-device-type", "BI150", "A100"):
        config(words, ranks=4, RANK="0")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"activation": "gelu_tanh", "position": "learned", "norm": "layer", "tied": True}),
        ("--no-bias-gelu-fusion", {"activation": "gelu"}),
        ("--squared-relu --disable-bias-linear", {"activation": "squared_relu", "qkv_bias": False, "mlp_bias": False}),
        ("--swiglu", {"activation": "swiglu", "ffn_hidden_size": 128}),
        ("--ffn-hidden-size 100 --kv-channels 32", {"ffn_hidden_size": 100, "head_dim": 32}),
        ("--group-query-attention --num-query-groups 2", {"num_kv_heads": 2}),
        ("--disable-bias-linear --add-qkv-bias", {"qkv_bias": True, "out_bias": False}),
        ("--position-embedding-type rope --rotary-base 5e5", {"position": "rope", "rope_theta": 5e5}),
        ("--use-rotary-position-embeddings --window-size 15,0", {"position": "rope", "windows": (16,)}),
        ("--normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm", {"norm": "rms", "norm_eps": 1e-6}),
        ("--qk-layernorm", {"qk_norm": "head"}),
        ("--tokenizer-type NullTokenizer", {"vocab_size": 101}),
        ("--untie-embeddings-and-output-weights --init-method-std 0.01", {"tied": False, "init_std": 0.01}),
    ],
)
def test_architecture(words: str, expected: dict[str, object]) -> None:
    spec = config(f"{FLAGS} {words}").spec
    assert {key: said(spec, key) for key in expected} == expected


def test_rope_scaling_is_that_of_llama_3_1() -> None:
    spec = config(f"{FLAGS} --position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4").spec
    scaling = spec.ropes[0].scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == ("llama3", 4, 1, 4)
    assert scaling.original_max_position_embeddings == 8192


def test_training_by_samples_with_a_ramp() -> None:
    c = config(
        f"--model tiny --mock-data {SIZES} --global-batch-size 8 --rampup-batch-size 2 2 60 --train-samples 200 "
        "--lr 1 --min-lr 0.1 --lr-decay-style WSD --lr-wsd-decay-samples 50 --lr-warmup-fraction .1 "
        "--lr-wsd-decay-style minus_sqrt --weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1"
    )
    assert (c.batch_size.at(0), c.batch_size.at(100), c.train_samples) == (2, 8, 200)
    assert (c.learning_rate.warmup, c.learning_rate.decay, c.learning_rate.wsd_decay) == (20, 200, 50)
    assert c.weight_decay.at(0) == 0 and c.weight_decay.at(200) == pytest.approx(0.1)


def test_the_rest_arrives() -> None:
    c = config(
        f"{TINY} --fp16 --loss-scale-window 100 --hysteresis 3 --optimizer sgd --sgd-momentum 0.5 --clip-grad 0 "
        "--eval-interval 5 --eval-iters 3 --exit-interval 7 --exit-duration-in-mins 9 --exit-signal-handler "
        "--save runs/a --tensorboard-dir runs/b --wandb-project p --wandb-exp-name n --log-interval 3 "
        "--log-validation-ppl-to-tensorboard --distributed-backend gloo --distributed-timeout-minutes 2 "
        "--deterministic-mode --no-check-for-nan-in-loss-and-grad --eod-mask-loss --num-workers 0"
    )
    assert (c.dtype, c.loss_scale.dynamic, c.loss_scale.scale, c.loss_scale.hysteresis) == ("fp16", True, 2.0**32, 3)
    assert (c.optimizer.name, c.optimizer.momentum, c.optimizer.clip_grad) == ("sgd", 0.5, 0)
    assert (c.evaluation.interval, c.evaluation.iterations) == (5, 3)
    assert (c.exit.interval, c.exit.minutes, c.exit.signal) == (7, 9, "SIGTERM")
    assert (c.logging.save, c.logging.tensorboard_dir, c.logging.interval) == ("runs/a", "runs/b", 3)
    assert c.logging.validation_perplexity and c.logging.wandb == {"project": "p", "name": "n"}
    assert (c.distributed.backend, c.distributed.timeout_minutes) == ("gloo", 2)
    assert c.deterministic and not c.check_nan and c.data is not None
    assert c.data.eod_mask_loss and c.data.num_workers == 0


def test_dry_run_needs_neither_data_nor_length_nor_ranks() -> None:
    c = configure(shlex.split(f"{MODEL} {SIZES} --dry-run --tensor-model-parallel-size 2 --as-rank 1"), {})
    assert c.dry_run and c.as_rank == 1 and c.plan.world_size == 2 and c.steps == 0
    large = f"--model llama2-7b {SIZES} --dry-run --world-size 64 --pipeline-model-parallel-size 8"
    assert configure(shlex.split(large), {}).plan.world_size == 64


def test_every_notice_flag_is_accepted_and_says_so() -> None:
    for flag in ALL:
        if flag.status == NOTICE:
            count = flag.nargs if isinstance(flag.nargs, int) else 1
            c = config(f"{TINY} {flag.name} {'1 ' * count}")
            assert [text for text in c.notices if text.startswith(f"{flag.name} has no effect")], flag.name


def test_every_refused_flag_says_why_and_what_instead() -> None:
    for flag in ALL:
        if flag.status == REFUSED:
            count = flag.nargs if isinstance(flag.nargs, int) else 1
            with pytest.raises(UserError) as caught:
                config(f"{TINY} {flag.name} {'1 ' * count}")
            assert caught.value.field == flag.name and flag.help in str(caught.value), flag.name
            assert flag.remedy in str(caught.value)


# Launch lines


def read_line(path: Path, tmp_path: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """(steps of the header, words after the script's name)."""
    steps, command = [], ""
    for line in path.read_text().splitlines():
        found = re.match(r"# ([a-z]+)( --\S+)?: (.*)", line)
        if found:
            steps.append((found[1] + (found[2] or ""), found[3]))
        elif not line.startswith("#"):
            command += line.removesuffix("\\") + " "
    files = {"$VOCAB": tmp_path / "vocab.json", "$MERGES": tmp_path / "merges.txt", "$OUT": tmp_path}
    for name, file in files.items():
        command = command.replace(name, str(file))
    return steps, shlex.split(command[command.index("pretrain_gpt.py") :])[1:]


def byte_level_vocabulary() -> dict[str, int]:
    """GPT-2's 256 byte characters and its end of text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + i for i in range(256 - len(printable))]
    return {token: i for i, token in enumerate([*map(chr, printable + others), "<|endoftext|>"])}


def without(words: list[str], flags: set[str]) -> list[str]:
    """The words without these flags and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
    return kept


def said(spec: ModelSpec, key: str) -> object:
    return spec.ropes[0].theta if key == "rope_theta" else getattr(spec, key)


def agrees(value: object, text: str) -> bool:
    return str(value) == text


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.stem)
def test_launch_line(path: Path, tmp_path: Path) -> None:
    """The header of a fixture says, in order, what is refused, what to change, and what the rest means."""
    (tmp_path / "vocab.json").write_text(json.dumps(byte_level_vocabulary()))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    steps, words = read_line(path, tmp_path)
    environment = {"WORLD_SIZE": dict(steps)["world"]}
    for step, text in steps:
        kind, _, flag = step.partition(" ")
        pairs = [pair.partition("=")[::2] for pair in text.split()] if kind in ("spec", "plan", "run") else []
        if kind == "refused":
            with pytest.raises(UserError) as caught:
                configure(words, environment)
            assert caught.value.field == flag and text in str(caught.value)
        elif kind == "drop":
            words = without(words, set(text.split()))
        elif kind == "add":
            words += text.split()
        elif kind == "spec":
            spec = configure(words, environment).spec
            assert [(k, said(spec, k), v) for k, v in pairs if not agrees(said(spec, k), v)] == []
        elif kind == "plan":
            pipelines = configure(words, environment).plan.pipelines
            stages = pipelines[0].stages
            found = {
                "pipelines": len(pipelines), "stages": len(stages), "tp": stages[0].units[0].tp,
                "micro_batches": pipelines[0].num_micro_batches, "layers": ",".join(str(s.num_layers) for s in stages),
            }  # fmt: skip
            assert [(k, found[k], v) for k, v in pairs if not agrees(found[k], v)] == []
        elif kind == "run":
            c, wanted = configure(words, environment), dict(pairs)
            assert (c.dtype, str(c.steps)) == (wanted["dtype"], wanted["steps"])
            (block,) = [text for text in c.notices if "no effect" in text]
            assert wanted["notice"] in block and block.count("\n") > 1


def test_there_are_five_launch_lines() -> None:
    assert len(LINES) == 5


# Bad words

HETERO = f"{FLAGS} --hetero-pipeline-layer-split 2 2 --hetero-process-meshes"


def bad_words() -> dict[str, tuple[str, int, str, str]]:
    """name -> (words, ranks, field, what the message also says), from tests/fixtures/bad_flags.txt."""
    result = {}
    for line in (FIXTURES / "bad_flags.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, ranks, field, says, words = line.split(" | ")
            result[name] = (words.format_map(globals()), int(ranks), field, says)
    return result


BAD = bad_words()


@pytest.mark.parametrize("name", BAD)
def test_bad_words(name: str) -> None:
    words, ranks, field, says = BAD[name]
    with pytest.raises(UserError) as caught:
        config(words, ranks)
    error, message = caught.value, str(caught.value)
    assert error.field == field, message
    assert says in message, message
    assert "\n" not in message and len(message) < 700
    if field.startswith("--"):
        assert f"{field}" in message and error.accepted, message
        assert f"{field} = " in message or error.value is None, message


def test_all_refusals_stand_in_one_message() -> None:
    line = "--use-checkpoint-args --num-expert 8 --moe-enable-deepep --moe-input-jitter-eps 1 --seed many --lr 0x1"
    with pytest.raises(UserError) as caught:
        config(f"{TINY} {line} --bf16=1")
    message = str(caught.value)
    for part in (
        "7 flags cannot be taken", "--use-checkpoint-args = given: flags are not read", "--num-expert: unknown flag",
        "--moe-enable-deepep = given, --moe-input-jitter-eps = 1: it is not built",
        "--seed = many: is not an integer",
        "--lr = 0x1: is not a number", "--bf16 = 1: wrong number of values (accepted: no value)",
    ):  # fmt: skip
        assert part in message, message
    assert caught.value.field == "--use-checkpoint-args"


@pytest.mark.parametrize(
    ("dropped", "successor"),
    [
        ("--batch-size 4", "--micro-batch-size"), ("--warmup 0.1", "--lr-warmup-fraction"),
        ("--model-parallel-size 2", "--tensor-model-parallel-size"),
        ("--checkpoint-activations", "--recompute-granularity"),
        ("--distribute-checkpointed-activations", "--recompute-granularity"),
        ("--checkpoint-num-layers 2", "--recompute-granularity"),
    ],
)  # fmt: skip
def test_a_flag_that_megatron_dropped_names_its_successor_alone(dropped: str, successor: str) -> None:
    with pytest.raises(UserError) as caught:
        config(f"{TINY} {dropped}")
    assert (caught.value.field, caught.value.accepted) == (dropped.split()[0], successor)


def test_a_permission_for_other_flags_says_nothing_itself() -> None:
    """Megatron's recipe of DeepSeek-V3 has it for a fused loss; what it permits is refused where it stands."""
    (notice,) = config(f"{TINY} --enable-experimental").notices
    assert notice.startswith("--enable-experimental has no effect")
    with refused("--attention-output-gate"):
        config(f"{TINY} --enable-experimental --attention-output-gate")


# The script


def run_script(words: str) -> Iterator[subprocess.CompletedProcess[str]]:
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    command = [sys.executable, "pretrain_gpt.py", *shlex.split(words)]
    yield subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_script_refuses_in_one_line_with_exit_code_2() -> None:
    for done in run_script(f"{TINY} --seed x"):
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == "error: command line: --seed = x: is not an integer. Accepted: an integer\n"


def test_script_prints_help_and_a_dry_run() -> None:
    for done in run_script("--help"):
        assert done.returncode == 0 and "--tensor-model-parallel-size" in done.stdout
    for done in run_script(f"--model tiny --plan {PLAN} --dry-run --use-mcore-models"):
        assert done.returncode == 0, done.stderr
        assert "4 ranks, 2 pipelines" in done.stdout and "notice: --use-mcore-models has no effect" in done.stdout


def test_configuration_does_not_import_torch() -> None:
    code = (
        "import sys; from hetero_megatron.cli.configure import configure; "
        f"configure({shlex.split(FILE)!r}, {{'WORLD_SIZE': '4'}}); configure({shlex.split(FLAGS)!r}, {{}}); "
        "print([name for name in ('torch', 'transformers', 'datasets', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_refusal_advises_what_is_refused_itself() -> None:
    """Flags and keys of a plan that a remedy names are supported."""
    by_name = index()
    for flag in ALL:
        if flag.status != REFUSED and not flag.remedy:
            continue
        for name in re.findall(r"--[a-z][a-z0-9-]*", flag.remedy):
            if name in by_name:  # else it is of another command
                assert by_name[name].status != REFUSED, (flag.name, name)
        for key, value in re.findall(r"optimizer: \{(\w+): (\w+)", flag.remedy):
            assert value != "true" or supports(f"optimizer.{key}"), (flag.name, key)
        for name in re.findall(r"schedule: ([\w-]+)", flag.remedy):
            assert supports(f"schedule.{name}"), (flag.name, name)
