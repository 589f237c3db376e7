"""The command line: every flag that Megatron's users know is in the table, and what cannot be honoured is refused by
name, at once, before torch is imported."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.flag import NOTICE, REFUSED, SUPPORTED
from hetero_megatron.cli.flags import help_text, markdown
from hetero_megatron.cli.main import main as hetero_megatron
from hetero_megatron.cli.parse import parse
from hetero_megatron.cli.pretrain import main as pretrain
from hetero_megatron.cli.table import ALL
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import RunConfig

ROOT = Path(__file__).parent.parent
FIXTURES = Path(__file__).parent / "fixtures"
MEGATRON_FLAGS = (FIXTURES / "megatron_flags.txt").read_text().split()
LAUNCH_LINES = sorted((FIXTURES / "launch_lines").glob("*.sh"))

TINY = "--model tiny --mock-data --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100"
FLAGS = f"{SHAPE} --mock-data --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"


def config(line: str, ranks: int = 1) -> RunConfig:
    return configure(line.split(), {"WORLD_SIZE": str(ranks)})


# The table


def test_every_known_flag_is_in_the_table_once() -> None:
    names = [name for flag in ALL for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))
    assert len(MEGATRON_FLAGS) == len(set(MEGATRON_FLAGS)) > 200
    assert [name for name in MEGATRON_FLAGS if names.count(name) != 1] == []


def test_entries_are_complete() -> None:
    for flag in ALL:
        assert flag.name.startswith("--") and flag.help and not flag.help.endswith("."), flag.name
        assert flag.status in (SUPPORTED, NOTICE, REFUSED)
        assert flag.status != REFUSED or flag.remedy, flag.name
        if flag.choices and flag.default is not None:
            assert flag.default in flag.choices, flag.name


def test_documents_hold_every_flag() -> None:
    page = markdown()
    assert all(f"`{flag.name}`" in page for flag in ALL)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {3, 5}
    assert all(flag.name in help_text() for flag in ALL if flag.status == SUPPORTED and not flag.remedy)


def test_each_flag_alone_is_taken_noticed_or_refused() -> None:
    for flag in ALL:
        if flag.status == REFUSED:
            with pytest.raises(UserError) as caught:
                parse([flag.name, "1"])
            assert caught.value.field == flag.name and flag.help in str(caught.value)
        elif flag.status == NOTICE:
            count = {"+": 1, "*": 0}.get(flag.nargs, flag.nargs)  # type: ignore[call-overload]
            found = parse([flag.name, *["1"] * count])
            assert found.notices == [f"{flag.name} has no effect: {flag.help}"]


# Refusals: (flags after TINY or FLAGS, the field, a part of the message)

BAD = [
    (f"{TINY} --num-expert 8", "--num-expert", "did you mean --num-experts?"),
    (f"{TINY} --tensor_model_parallel_size 2", "--tensor_model_parallel_size", "did you mean --tensor-model-parallel-size?"),
    (f"{TINY} --tensor-model-parallel 2", "--tensor-model-parallel", "unknown flag"),
    (f"{TINY} --colour red", "--colour", "unknown flag"),
    (f"{TINY} extra", "--lr", "wrong number"),
    ("extra", "extra", "belongs to no flag"),
    (f"{TINY} --bf16 extra", "extra", "belongs to no flag"),
    (f"{TINY} --bf16=yes", "--bf16", "no value"),
    (f"{TINY} --lr", "--lr", "wrong number of values"),
    (f"{TINY} --seed many", "--seed", "is not an integer"),
    (f"{TINY} --seed -1", "--seed", "is negative"),
    (f"{TINY} --lr nan", "--lr", "is not a number"),
    (f"{TINY} --optimizer muon", "--optimizer", "adam, sgd"),
    (f"{TINY} --fp8-format hybrid", "--fp8-format", "Accepted: --bf16"),
    (f"{TINY} --num-experts 8", "--num-experts", "mixture-of-experts"),
    (f"{TINY} --hidden-dropout 0.1", "--hidden-dropout", "not built yet. Accepted: 0.0"),
    (f"{TINY} --context-parallel-size 2", "--context-parallel-size", "context parallelism"),
    (f"{TINY} --expert-model-parallel-size 2", "--expert-model-parallel-size", "expert parallelism"),
    (f"{TINY} --num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage", "virtual"),
    (f"{TINY} --auto-plan", "--auto-plan", "planner is not built yet"),
    (f"{TINY} --cluster c.yaml", "--cluster", "planner is not built yet"),
    (f"{TINY} --load ckpt", "--load", "checkpoints are not built yet"),
    (f"{TINY} --save-interval 10", "--save-interval", "checkpoints are not built yet"),
    (f"{TINY} --recompute-modules mlp", "--recompute-modules", "core_attn"),
    (f"{TINY} --hidden-size 64", "--hidden-size", "--model says this already"),
    (f"{TINY} --model huge", "--model", "llama3-8b"),
    (f"{TINY} --bf16 --fp16", "--fp16", "contradicts bf16"),
    (f"{TINY} --bf16 --loss-scale 8", "--loss-scale", "needs no loss scale"),
    (f"{TINY} --fp16 --loss-scale 0", "--loss-scale", "more than 0"),
    (f"{TINY} --fp16 --hysteresis 0", "--hysteresis", "1 or more"),
    (f"{TINY} --train-samples 100", "--train-iters", "counts samples"),
    (f"{TINY} --rampup-batch-size 1 1 10", "--rampup-batch-size", "counts iterations"),
    (f"{TINY} --rampup-batch-size 1 1", "--rampup-batch-size", "3 values"),
    (f"{TINY} --lr-warmup-samples 5", "--lr-warmup-samples", "counts iterations"),
    (f"{TINY} --lr-warmup-fraction 0.1 --lr-warmup-iters 2", "--lr-warmup-fraction", "one of the two"),
    (f"{TINY} --lr-warmup-fraction 1.5", "--lr-warmup-fraction", "less than 1"),
    (f"{TINY} --lr-warmup-iters 10", "--lr-warmup-iters", "less than"),
    (f"{TINY} --lr-decay-style WSD", "--lr-wsd-decay-iters", "missing"),
    (f"{TINY} --min-lr 1", "--min-lr", "out of range"),
    (f"{TINY} --end-weight-decay 0.1", "--end-weight-decay", "weight decay is constant"),
    (f"{TINY} --weight-decay-incr-style linear", "--start-weight-decay", "missing"),
    (f"{TINY} --adam-beta2 1", "--adam-beta2", "less than 1"),
    (f"{TINY} --clip-grad -1", "--clip-grad", "0 or more"),
    (f"{TINY} --exit-signal SIGINT", "--exit-signal", "--exit-signal-handler"),
    (f"{TINY} --log-interval 0", "--log-interval", "too small"),
    (f"{TINY} --wandb-exp-name x", "--wandb-exp-name", "--wandb-project"),
    (f"{TINY} --data-path stdlib", "--mock-data", ""),
    (f"{TINY} --tokenizer-type TikTokenizer", "--tokenizer-type", "does not read"),
    (f"{TINY} --global-batch-size 3", "--global-batch-size", "not a multiple of 2"),
    (f"{TINY} --pipeline-model-parallel-size 4", "--tensor-model-parallel-size", "multiple of 4"),
    (f"{TINY} --world-size 4", "--world-size", "torchrun"),
    (f"{TINY} --hetero-device-types A B", "--hetero-process-meshes", "missing"),
    (f"{TINY} --plan p.yaml", "--micro-batch-size", "the plan file says this already"),
    (TINY.replace("--lr 1e-3", ""), "--lr", "missing"),
    (TINY.replace("--train-iters 10", ""), "--train-iters", "missing"),
    (TINY.replace("--mock-data", ""), "--data-path", "no data"),
    (TINY.replace("--model tiny", ""), "--num-layers", "missing"),
    (f"{FLAGS} --num-attention-heads 5", "--num-attention-heads", "does not divide"),
    (f"{FLAGS} --group-query-attention --num-query-groups 3", "--num-query-groups", "divisor of 4"),
    (f"{FLAGS} --num-query-groups 2", "--num-query-groups", "--group-query-attention"),
    (f"{FLAGS} --kv-channels 15 --position-embedding-type rope", "--kv-channels", "an even number"),
    (f"{FLAGS} --swiglu --squared-relu", "--squared-relu", "contradicts --swiglu"),
    (f"{FLAGS} --use-rope-scaling", "--use-rope-scaling", "no rotary embedding"),
    (f"{FLAGS} --position-embedding-type yarn", "--position-embedding-type", "learned_absolute, rope"),
    (f"{FLAGS} --position-embedding-type rope --window-size 8,1", "--window-size", "RIGHT = 0"),
    (f"{FLAGS} --rotary-percent 0.5", "--rotary-percent", "Accepted: 1.0"),
    (f"{FLAGS} --vocab-size 0", "--vocab-size", "too small"),
]  # fmt: skip


@pytest.mark.parametrize("line, field, says", BAD, ids=[f"{i}{case[1]}" for i, case in enumerate(BAD)])
def test_bad_flags(line: str, field: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        config(line)
    message = str(caught.value)
    assert field in message and says in message, message
    assert "\n" not in message and len(message) < 600


# What flags mean


def test_defaults_are_megatrons() -> None:
    got = config(FLAGS)
    assert (got.seed, got.dtype, got.steps, got.train_samples) == (1234, "fp32", 10, 20)
    assert (got.optimizer.beta2, got.optimizer.clip_grad, got.weight_decay.at(0)) == (0.999, 1.0, 0.01)
    assert got.learning_rate.at(0) == 1e-3 and got.learning_rate.at(10) == pytest.approx(5e-4)
    spec = got.spec
    assert (spec.norm, spec.activation, spec.position, spec.tied) == ("layer", "gelu_tanh", "learned", True)
    assert spec.qkv_bias and spec.out_bias and spec.mlp_bias and spec.ffn_hidden_size == 256
    assert got.evaluation.iterations == 0 and got.check_nan and got.notices == ()


def test_architecture_flags() -> None:
    spec = config(
        f"{FLAGS} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --add-qkv-bias "
        "--qk-layernorm --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
        "--use-rope-scaling --kv-channels 32 --window-size 15,0 --norm-epsilon 1e-6 --max-position-embeddings 128"
    ).spec
    assert (spec.activation, spec.norm, spec.position, spec.tied) == ("swiglu", "rms", "rope", False)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.qk_norm) == (True, False, False, True)
    assert (spec.num_kv_heads, spec.head_dim, spec.sliding_window, spec.max_position_embeddings) == (2, 32, 16, 128)
    assert spec.ffn_hidden_size == 128  # 2/3 of 4 x 64, down to a multiple of 64
    assert spec.rope_scaling is not None and spec.rope_scaling.factor == 8.0
    assert config(f"{FLAGS} --no-bias-gelu-fusion").spec.activation == "gelu"


def test_vocabulary_comes_from_the_tokenizer() -> None:
    line = FLAGS.replace("--vocab-size 100", "")
    assert config(line).spec.vocab_size == 257
    assert config(f"{FLAGS} --tokenizer-type NullTokenizer").spec.vocab_size == 101


def test_parallel_flags_build_the_plan() -> None:
    got = config(f"{TINY} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8", 8)
    assert got.plan.world_size == 8 and len(got.plan.pipelines) == 2
    assert config(f"{TINY} --schedule gpipe").plan.schedule == "gpipe"
    meshes = f"{TINY} --hetero-process-meshes 2 1 1 1 1 1 1 1 1 2 --hetero-pipeline-layer-split 2 2 2"
    stages = config(meshes, 4).plan.pipelines[0].stages
    assert [s.num_layers for s in stages] == [2, 2, 2] and [len(s.ranks) for s in stages] == [2, 1, 1]
    with pytest.raises(UserError, match="--pipeline-model-parallel-size = 2.*3 stages"):
        config(f"{meshes} --pipeline-model-parallel-size 2", 4)


def test_plan_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "version: 1\nseq_length: 64\nglobal_batch_size: 4\nschedule: 1f1b\npipelines:\n"
        "  - micro_batch_size: 1\n    num_micro_batches: 4\n    stages:\n"
        "      - {ranks: [0], layers: [0, 4]}\n      - {ranks: [1], layers: [4, 6]}\n"
    )
    line = f"--plan {path} --model tiny --data-path stdlib --train-iters 3 --lr 1e-3"
    assert config(line, 2).train_samples == 12
    assert config(line, 3).plan.world_size == 2  # rank 2 stays idle
    with pytest.raises(UserError, match="needs 2 ranks and 1 was started"):
        config(line, 1)
    with pytest.raises(UserError, match="--seq-length = 128: the plan file says 64"):
        config(f"{line} --seq-length 128", 2)
    with pytest.raises(UserError, match="--tensor-model-parallel-size = 2: the plan file says this already"):
        config(f"{line} --tensor-model-parallel-size 2", 2)
    assert config(f"--plan {path} --model tiny --dry-run").dry_run


def test_samples_and_ramp_up() -> None:
    line = TINY.replace("--train-iters 10", "--train-samples 100")
    got = config(f"{line} --global-batch-size 8 --rampup-batch-size 2 2 24 --lr-warmup-samples 10")
    assert [got.batch_size.at(n) for n in (0, 8, 16, 24, 25)] == [2, 4, 6, 8, 8]
    assert got.steps == 4 + 2 + 2 + 9 and got.train_samples == 8 + 8 + 12 + 9 * 8
    assert got.learning_rate.at(5) == pytest.approx(5e-4)


def test_iterations_count_in_batches() -> None:
    got = config(f"{TINY} --lr-warmup-iters 2 --lr-decay-iters 8 --lr-decay-style cosine --min-lr 1e-4")
    assert (got.learning_rate.warmup, got.learning_rate.decay) == (4, 16)
    assert config(f"{TINY} --lr-warmup-fraction 0.25").learning_rate.warmup == 5


def test_precision() -> None:
    assert config(f"{TINY} --bf16").dtype == "bf16"
    assert config(f"{TINY} --dtype fp64").dtype == config(f"{TINY} --fp64").dtype == "fp64"
    half = config(f"{TINY} --fp16").loss_scale
    assert half.dynamic and half.scale == 2.0**32 and (half.window, half.hysteresis) == (1000, 2)
    assert not config(f"{TINY} --fp16 --loss-scale 128").loss_scale.dynamic


def test_the_last_of_two_counts_with_a_notice() -> None:
    got = config(f"{TINY} --seed 1 --seed 2 --sequence-parallel")
    assert got.seed == 2
    assert any("--seed stands twice" in line for line in got.notices)
    assert any(line.startswith("--sequence-parallel has no effect") for line in got.notices)


# Launch lines


def _words(path: Path) -> tuple[dict[str, str], list[str]]:
    """(what the fixture says about itself, words after pretrain_gpt.py)."""
    text = path.read_text()
    facts = dict(re.findall(r"^# (ranks|refused|says|without|with): (.*)$", text, re.MULTILINE))
    text = text.replace("\\\n", " ")
    variables = {name: value.strip('"') for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)}
    line = next(line for line in text.splitlines() if "pretrain_gpt.py" in line and not line.startswith("#"))
    line = re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], "0"), line)
    return facts, shlex.split(line.split("pretrain_gpt.py", 1)[1])


def _without(words: list[str], names: list[str]) -> list[str]:
    kept, drop = [], False
    for word in words:
        drop = word in names if word.startswith("--") else drop
        kept += [] if drop else [word]
    return kept


@pytest.mark.parametrize("path", LAUNCH_LINES, ids=lambda path: path.stem)
def test_launch_lines(path: Path) -> None:
    facts, words = _words(path)
    environment = {"WORLD_SIZE": facts["ranks"]}
    if "refused" in facts:
        with pytest.raises(UserError) as caught:
            configure(words, environment)
        assert caught.value.field == facts["refused"] and facts["says"] in str(caught.value)
        if "without" not in facts:
            return
    words = _without(words, facts.get("without", "").split()) + facts.get("with", "").split()
    got = configure(words, environment)
    assert got.plan.world_size == int(facts["ranks"])
    layers, heads, kv_heads, pipelines = {
        "gpt3_175b": (96, 96, 96, 8),
        "llama3_8b": (32, 32, 8, 2),
        "llama2_7b": (32, 32, 32, 2),
        "qwen2.5_7b_flagscale": (28, 28, 4, 2),
    }[path.stem]
    assert (got.spec.num_layers, got.spec.num_heads, got.spec.num_kv_heads) == (layers, heads, kv_heads)
    assert len(got.plan.pipelines) == pipelines


def test_there_are_five_launch_lines() -> None:
    assert len(LAUNCH_LINES) == 5


# As users see it


def test_a_refusal_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain([*TINY.split(), "--num-experts", "8"], {}) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: command line: --num-experts: ")
    assert captured.err.count("\n") == 1


def test_refusals_and_dry_runs_do_not_import_torch() -> None:
    code = (
        "import sys; from hetero_megatron.cli.pretrain import main; "
        "assert main(sys.argv[1].split(), {}) == 2; assert main(sys.argv[2].split(), {}) == 0; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    bad, dry = f"{TINY} --global-batch-size 3", f"{TINY} --dry-run --tensor-model-parallel-size 2"
    done = subprocess.run(
        [sys.executable, "-c", code, bad, dry], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tp 2" in done.stdout and "error: command line: --global-batch-size = 3" in done.stderr


def test_script_and_help() -> None:
    run = [sys.executable, "pretrain_gpt.py"]
    bad = subprocess.run([*run, "--fp8-format", "e4m3"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert bad.returncode == 2 and "Traceback" not in bad.stderr and bad.stderr.startswith("error: ")
    help_ = subprocess.run([*run, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert help_.returncode == 0 and "--tensor-model-parallel-size" in help_.stdout


def test_sub_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert hetero_megatron(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert hetero_megatron(["plan"]) == 2
    assert "command = plan: not built yet" in capsys.readouterr().err
    assert hetero_megatron(["docter"]) == 2
    assert "did you mean doctor?" in capsys.readouterr().err
    assert hetero_megatron(["doctor", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err
    assert hetero_megatron(["doctor", "--json"]) in (0, 1)
    assert capsys.readouterr().out.startswith("{")
