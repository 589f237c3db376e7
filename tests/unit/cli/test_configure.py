"""What flags mean: the RunConfig that they build, what they refuse together, and how users see it. The table itself is
tested in test_flags.py."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.main import main as hetero_megatron
from hetero_megatron.cli.pretrain import main as pretrain
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import RunConfig
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.small_plans import LLAMA

TINY = "--model tiny --mock-data --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100"
MOE = (
    f"{SHAPE} --mock-data --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --num-experts 8 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
)
FLAGS = f"{SHAPE} --mock-data --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"


def config(line: str, ranks: int = 1) -> RunConfig:
    return configure(line.split(), {"WORLD_SIZE": str(ranks)})


# Refusals: (flags after TINY or FLAGS, the field, a part of the message)

BAD = [
    (f"{TINY} --num-expert 8", "--num-expert", "did you mean --num-experts?"),
    (f"{TINY} --tensor_model_parallel_size 2", "--tensor_model_parallel_size", "mean --tensor-model-parallel-size?"),
    (f"{TINY} --tensor-model-parallel 2", "--tensor-model-parallel", "unknown flag"),
    (f"{TINY} --colour red", "--colour", "unknown flag"),
    ("extra", "word", "belongs to no flag"),
    (f"{TINY} --bf16 extra", "word", "belongs to no flag"),
    (f"{TINY} --bf16=yes", "--bf16", "no value"),
    (f"{TINY} --seed", "--seed", "wrong number of values"),
    (f"{TINY} --seed many", "--seed", "is not an integer"),
    (f"{TINY} --seed -1", "--seed", "too small"),
    (f"{TINY} --lr nan", "--lr", "is not a number"),
    (f"{TINY} --lr 1e999", "--lr", "is not finite"),
    (f"{TINY} --seed {'9' * 20}", "--seed", "is out of range"),
    (f"{TINY} --save=", "--save", "is empty"),
    (f"{TINY} --optimizer lion", "--optimizer", "adam, sgd"),
    (f"{TINY} --fp8-format hybrid", "--fp8-recipe", "Accepted: tensorwise or blockwise"),
    (f"{TINY} --num-experts 8", "--num-experts", "--model tiny says none"),
    (f"{FLAGS} --num-experts 8", "--swiglu", "gated by SiLU"),
    (f"{FLAGS} --swiglu --num-experts 8", "--disable-bias-linear", "no biases"),
    (f"{MOE} --moe-router-topk 9", "--moe-router-topk", "there are 8 experts"),
    (f"{MOE} --moe-router-topk 1", "--moe-router-topk", "--moe-router-pre-softmax"),
    (f"{MOE} --moe-router-score-function sigmoid --moe-router-pre-softmax", "--moe-router-pre-softmax", "no effect"),
    (f"{MOE} --moe-router-score-function sqrtsoftplus", "--moe-router-score-function", "softmax, sigmoid"),
    (f"{MOE} --moe-router-num-groups 4", "--moe-router-num-groups", "--moe-router-group-topk"),
    (f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 1", "--moe-router-num-groups", "does not divide 8"),
    (f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 3", "--moe-router-group-topk", "1 to 2"),
    (f"{MOE} --moe-shared-expert-gate", "--moe-shared-expert-gate", "--moe-shared-expert-intermediate-size"),
    (f"{MOE} --moe-layer-freq 0", "--moe-layer-freq", "each of 2 layers"),
    (f"{MOE} --moe-layer-freq [1]*3", "--moe-layer-freq", "each of 2 layers"),
    (f"{MOE} --moe-layer-freq [1,2]", "--moe-layer-freq", "each of 2 layers"),
    (f"{MOE} --moe-layer-freq print(1)", "--moe-layer-freq", "each of 2 layers"),
    (f"{MOE} --moe-layer-freq {'[' * 3000}", "--moe-layer-freq", "each of 2 layers"),
    (f"{MOE} --moe-layer-freq 9**9**9*[1]", "--moe-layer-freq", "each of 2 layers"),
    (f"{FLAGS} --moe-router-topk 2", "--moe-router-topk", "no effect without --num-experts"),
    (f"{MOE} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2", "--moe-router-load-balancing-type",
     "a rank has 2 sequences"),
    (f"{MOE} --moe-router-load-balancing-type global_aux_loss", "--moe-router-load-balancing-type", "seq_aux_loss"),
    (f"{MOE} --moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type", "seq_aux_loss"),
    (f"{MOE} --moe-router-load-balancing-type seq_aux_loss", "--moe-aux-loss-coeff", "missing"),
    (f"{MOE} --moe-aux-loss-coeff 1e-2", "--moe-aux-loss-coeff", "seq_aux_loss"),
    (f"{MOE} --moe-z-loss-coeff -1", "--moe-z-loss-coeff", "0 or more"),
    (f"{MOE} --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias", "sigmoid"),
    (f"{MOE} --moe-router-bias-update-rate 1", "--moe-router-bias-update-rate", "--moe-router-enable-expert-bias"),
    (f"{MOE} --moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor", "seq_aux_loss"),
    (f"{MOE} --moe-token-drop-policy probs", "--moe-token-drop-policy", "never dropped"),
    (f"{MOE} --moe-router-dtype fp32", "--moe-router-dtype", "at least fp32"),
    (f"{MOE} --routing-stats /nowhere/x.json", "--routing-stats", "not there"),
    (f"{TINY} --moe-z-loss-coeff 1e-3", "--moe-z-loss-coeff", "no mixture of experts"),
    (f"{TINY} --routing-stats x.json", "--routing-stats", "no mixture of experts"),
    (f"{TINY} --hidden-dropout 1.0", "--hidden-dropout", "0 or more, less than 1"),
    (f"{TINY} --attention-dropout -0.1", "--attention-dropout", "too small"),
    (f"{TINY} --attention-dropout nan", "--attention-dropout", "not a number"),
    (f"{TINY} --context-parallel-size 2", "--context-parallel-size", "not a multiple of 1 x 2 x 1"),
    (f"{TINY} --context-parallel-size 2 --cp-comm-type ring", "--cp-comm-type", "p2p, a2a, a2a+p2p, allgather"),
    (f"{TINY} --context-parallel-size 2 --cp-comm-type a2a p2p", "--cp-comm-type", "one type for all layers"),
    (f"{TINY} --context-parallel-size 4 --cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes", "needs it"),
    (
        f"{TINY} --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 3",
        "--hierarchical-context-parallel-sizes",
        "product is 4",
    ),
    (
        f"{TINY} --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        "--hierarchical-context-parallel-sizes",
        "a2a+p2p",
    ),
    (f"{TINY} --expert-model-parallel-size 2", "--expert-model-parallel-size", "no mixture of experts"),
    (f"{TINY} --num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage", "virtual"),
    (f"{TINY} --auto-plan", "--auto-plan", "needs the cluster"),
    (f"{TINY} --cluster c.yaml", "--cluster", "no effect without --plan"),
    (f"{TINY} --use-checkpoint-args", "--use-checkpoint-args", "flags are not read from checkpoints"),
    (f"{TINY} --save x --save-interval -1", "--save-interval", "too small"),
    (f"{TINY} --recompute-modules mlp", "--recompute-modules", "core_attn"),
    (f"{TINY} --recompute-activations --recompute-modules layernorm moe_act --compile", "--compile", "elementwise"),
    (f"{TINY} --recompute-activations --recompute-modules norms", "--recompute-modules", "layernorm"),
    (f"{TINY} --hidden-size 64", "--hidden-size", "--model tiny says 128"),
    (f"{TINY} --model huge", "--model", "llama3-8b"),
    (f"{TINY} --bf16 --fp16", "--fp16", "contradicts bf16"),
    (f"{TINY} --bf16 --loss-scale 8", "--loss-scale", "needs no loss scale"),
    (f"{TINY} --fp16 --loss-scale 0", "--loss-scale", "above 0"),
    (f"{TINY} --fp16 --hysteresis 0", "--hysteresis", ">= 1"),
    (f"{TINY} --train-samples 100", "--train-iters", "counts samples"),
    (f"{TINY} --rampup-batch-size 1 1", "--rampup-batch-size", "3 values"),
    (f"{TINY} --lr-warmup-samples 5", "--lr-warmup-samples", "counts iterations"),
    (f"{TINY} --lr-warmup-fraction 0.1 --lr-warmup-iters 2", "--lr-warmup-fraction", "one of the two"),
    (f"{TINY} --lr-warmup-fraction 1.5", "--lr-warmup-fraction", "less than 1"),
    (f"{TINY} --lr-warmup-iters 10", "--lr-warmup-iters", "less than 10"),
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
    (f"{TINY} --pipeline-model-parallel-size 4", "--pipeline-model-parallel-size", "multiple of 4"),
    (f"{TINY} --world-size 4", "--world-size", "no effect without --dry-run"),
    (f"{TINY} --hetero-device-types A B", "--hetero-device-types", "--hetero-process-meshes"),
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
    assert got.evaluation.iterations == 0 and got.check_nan and len(got.notices) == 1 and "no dropout" in got.notices[0]


def test_architecture_flags() -> None:
    spec = config(
        f"{FLAGS} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --add-qkv-bias "
        "--qk-layernorm --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
        "--use-rope-scaling --kv-channels 32 --window-size 15,0 --norm-epsilon 1e-6 --max-position-embeddings 128"
    ).spec
    assert (spec.activation, spec.norm, spec.position, spec.tied) == ("swiglu", "rms", "rope", False)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.qk_norm) == (True, False, False, "head")
    assert (spec.num_kv_heads, spec.head_dim, spec.windows[0], spec.max_position_embeddings) == (2, 32, 16, 128)
    assert spec.ffn_hidden_size == 128  # 2/3 of 4 x 64, down to a multiple of 64
    scaling = spec.ropes[0].scaling
    assert scaling is not None and scaling.factor == 8.0
    assert config(f"{FLAGS} --no-bias-gelu-fusion").spec.activation == "gelu"


def test_vocabulary_comes_from_the_tokenizer() -> None:
    line = FLAGS.replace("--vocab-size 100", "")
    assert config(line).spec.vocab_size == 257
    assert config(f"{FLAGS} --tokenizer-type NullTokenizer").spec.vocab_size == 101


def test_text_for_pretrained_weights_is_read_with_their_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    base = f"--load-hf {tmp_path} --data-path {tmp_path / 'text.jsonl'} --seq-length 32 --micro-batch-size 1"
    words = [*base.split(), "--train-iters", "1", "--lr", "1e-3"]
    without = configure(words, {})
    assert without.data is not None and without.data.tokenizer_type is None
    assert any("holds no tokenizer: text is read byte by byte" in notice for notice in without.notices)
    (tmp_path / "tokenizer.json").write_text("{}")
    own = configure(words, {})
    assert own.data is not None and own.data.tokenizer_model == str(tmp_path)
    assert own.data.tokenizer_type == "HuggingFaceTokenizer"
    assert any(f"text is read with the tokenizer of --load-hf {tmp_path}" in notice for notice in own.notices)
    asked = configure([*words, "--tokenizer-type", "ByteTokenizer"], {})
    assert asked.data is not None and asked.data.tokenizer_type == "ByteTokenizer" and not asked.notices
    of_model = configure(["--model" if w == "--load-hf" else w for w in words], {})
    assert of_model.data is not None and of_model.data.tokenizer_model == str(tmp_path)
    assert any(f"text is read with the tokenizer of --model {tmp_path}" in notice for notice in of_model.notices)
    mock = configure([w for w in words if not w.endswith("text.jsonl") and w != "--data-path"] + ["--mock-data"], {})
    assert mock.data is not None and mock.data.tokenizer_type is None and not mock.notices


def test_parallel_flags_build_the_plan() -> None:
    got = config(f"{TINY} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8", 8)
    assert got.plan.world_size == 8 and len(got.plan.pipelines) == 2
    assert config(f"{TINY} --schedule gpipe").plan.schedule == "gpipe"
    meshes = f"{TINY} --hetero-process-meshes 2 1 1 1 1 1 1 1 1 2 --hetero-pipeline-layer-split 2 2 2"
    stages = config(meshes, 4).plan.pipelines[0].stages
    assert [s.num_layers for s in stages] == [2, 2, 2] and [len(s.ranks) for s in stages] == [2, 1, 1]
    with refused("--pipeline-model-parallel-size", "3 stages"):
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
    with refused("--seq-length", "128", "64"):
        config(f"{line} --seq-length 128", 2)
    with refused("--tensor-model-parallel-size", "plan file"):
        config(f"{line} --tensor-model-parallel-size 2", 2)
    assert config(f"--plan {path} --model tiny --dry-run").dry_run


def test_samples_and_ramp_up() -> None:
    line = TINY.replace("--train-iters 10", "--train-samples 100")
    got = config(f"{line} --global-batch-size 8 --rampup-batch-size 2 2 24 --lr-warmup-samples 10")
    assert [got.batch_size.at(n) for n in (0, 8, 16, 24, 25)] == [2, 4, 6, 8, 8]
    assert got.steps == 4 + 2 + 2 + 9 and got.train_samples == 8 + 8 + 12 + 9 * 8
    assert got.learning_rate.at(5) == pytest.approx(5e-4)


def test_aux_loss_is_the_sequence_loss_where_a_micro_batch_is_a_sequence_on_a_rank() -> None:
    line = MOE.replace("--micro-batch-size 2", "--micro-batch-size 1 --moe-router-load-balancing-type aux_loss")
    told = f"{line} --moe-aux-loss-coeff 1e-2"
    same = told.replace(" aux_loss", " seq_aux_loss")
    for more, ranks in (("", 1), ("", 2), ("--pipeline-model-parallel-size 2", 2)):
        assert config(f"{told} {more}", ranks).balancing == config(f"{same} {more}", ranks).balancing
        assert config(f"{told} {more}", ranks).balancing.sequence_loss == 1e-2
    assert config(line).balancing.sequence_loss == 0.0
    for more, reason in (("--tensor-model-parallel-size 2", "tensor parallelism 2"),
                         ("--context-parallel-size 2", "context parallelism")):  # fmt: skip
        with refused("--moe-router-load-balancing-type", reason):
            config(f"{told} {more} --sequence-parallel" if "tensor" in more else f"{told} {more}", 2)


def test_ramp_up_with_iterations() -> None:
    """A step is a step: as long as by samples, and rates at the steps that flags name."""
    line = f"{TINY.replace('--train-iters 10', '--train-iters 17')} --global-batch-size 8 --rampup-batch-size 2 2 24"
    got = config(f"{line} --lr-warmup-iters 6 --lr-decay-iters 12")
    consumed, sizes = [0], []
    for _ in range(17):
        sizes.append(got.batch_size.at(consumed[-1]))
        consumed.append(consumed[-1] + sizes[-1])
    assert sizes == [2] * 4 + [4] * 2 + [6] * 2 + [8] * 9
    assert (got.steps, got.train_samples) == (17, sum(sizes))
    assert (got.learning_rate.warmup, got.learning_rate.decay) == (consumed[6], consumed[12])
    for steps in range(40):
        assert got.batch_size.steps_for(got.batch_size.samples_after(steps))[0] == steps


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


FLAGSCALE = """
    --enable-hetero --hetero-device-types A800 BI150
    --hetero-process-meshes 2 1 1 4 1 4 1 1 2 1 --hetero-pipeline-layer-split 18 10
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28
    --group-query-attention --num-query-groups 4 --seq-length 4096 --max-position-embeddings 131072
    --position-embedding-type rope --rotary-base 1000000 --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights --vocab-size 152064
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32 --bf16 --micro-batch-size 1
    --global-batch-size 64 --train-samples 640000 --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine
    --lr-warmup-samples 6400 --weight-decay 0.1 --adam-beta2 0.95 --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model /models/Qwen2.5-7B --data-path /data/pile_text_document --split 1 --eval-iters 0
    --accumulate-allreduce-grads-in-fp32 --log-interval 1 --wandb-project qwen --wandb-exp-name hetero
"""


def test_a_launch_line_of_flagscale() -> None:
    got = config(FLAGSCALE, 16)
    assert (got.spec.hf_model_type, got.steps, got.dtype) == ("qwen2", 10000, "bf16")
    assert got.logging.wandb == {"project": "qwen", "name": "hetero"}
    assert len(got.plan.pipelines) == 2
    stages = got.plan.pipelines[0].stages
    assert [(s.chip, s.num_layers, len(s.ranks), s.dp_split) for s in stages] == [
        ("A800", 18, 4, (1, 1)),
        ("BI150", 10, 4, (2,)),
    ]


# As users see it


def test_a_refusal_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain([*TINY.split(), "--moe-router-dtype", "fp32"], {}) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: command line: --moe-router-dtype = fp32: ")
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
    assert hetero_megatron(["report"]) == 2
    assert "RUN_DIR" in capsys.readouterr().err
    assert hetero_megatron(["docter"]) == 2
    assert "did you mean doctor?" in capsys.readouterr().err
    assert hetero_megatron(["doctor", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err
    code = hetero_megatron(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    statuses = {finding["name"]: finding["status"] for finding in found["findings"]}
    assert statuses["python"] == statuses["torch"] == statuses["numpy"] == "ok"  # else this test would not run
    assert {"testbed namespaces", "testbed memory", "testbed kernel", "cores"} <= set(statuses)
    assert found["ok"] == ("MISSING" not in statuses.values()) and code == (0 if found["ok"] else 1)
    assert all(finding["remedy"] for finding in found["findings"] if finding["status"] != "ok")


# A refusal names a flag of the line, whatever law of plans is broken by what was built from it.

GRID = "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --vocab-size 64 --micro-batch-size 2 --dry-run"
PARALLEL = {
    "--tensor-model-parallel-size": (1, 2, 3, 5, 8),
    "--pipeline-model-parallel-size": (1, 2, 3, 4, 5, 7),
    "--context-parallel-size": (1, 1, 2, 3),
    "--cp-comm-type": ("p2p", "a2a", "allgather", "a2a+p2p"),
    "--decoder-first-pipeline-num-layers": (0, 1, 3),
    "--decoder-last-pipeline-num-layers": (0, 1, 2),
    "--pipeline-model-parallel-layout": ("E|t|tt|L", "E||ttt|L", "Ettt|||L", "Ett|tL", "E|t|t||tL", "EtttL", "E|L|ttt"),
    "--account-for-embedding-in-pipeline-split": ("",),
    "--account-for-loss-in-pipeline-split": ("",),
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("block", "uniform"),
    "--recompute-num-layers": (1, 2, 9),
    "--global-batch-size": (2, 6, 24, 120),
    "--hetero-process-meshes": ("2 1 1 1 1 1 1 1 1 2", "1 2 1 1 3", "5 1 1 1 2", "1 3 1 1 1 1 1 1 1 1"),
    "--hetero-pipeline-layer-split": ("1 0 2", "3", "0 3", "1 2", "0 0 3", "1 1 1"),
}


def random_line(rng: random.Random) -> dict[str, str]:
    """A few flags of parallelism, by name; a layout or a split mostly fits the number of stages."""
    given = {name: str(rng.choice(PARALLEL[name])) for name in rng.sample(list(PARALLEL), rng.randint(1, 4))}
    stages = given.get("--pipeline-model-parallel-layout", "").count("|") + 1
    if stages > 1 and rng.random() < 0.8:
        given["--pipeline-model-parallel-size"] = str(stages)
    if ("--hetero-process-meshes" in given) != ("--hetero-pipeline-layer-split" in given):
        for name in ("--hetero-process-meshes", "--hetero-pipeline-layer-split"):
            given.setdefault(name, str(rng.choice(PARALLEL[name])))
    return given | {"--seq-length": str(rng.choice((2, 3, 64)))}


def test_refusals_of_plans_that_flags_built_name_a_flag_of_the_line() -> None:
    rng, refused = random.Random(18), Counter[str]()
    for _ in range(600):
        given = random_line(rng)
        line = f"{GRID} {' '.join(f'{name} {text}' for name, text in given.items())}"
        try:
            configure(line.split(), {})
        except UserError as error:
            missing = "missing" in error.problem or "needs it" in error.problem
            assert error.where == "command line" and (error.field in given or missing), f"{line}: {error}"
            refused[f"{error.field} {error.problem.rpartition(': ')[2][:30]}"] += 1
    assert len(refused) > 25 and refused.total() < 600, refused  # of many kinds, and some lines are good


@pytest.mark.parametrize(
    ("flags", "field", "message"),
    [
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E||ttt|L",
         "--pipeline-model-parallel-layout", "stage 1, counted from 0: the stage holds no layers"),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ettt|||L",
         "--pipeline-model-parallel-layout", "stage 1, counted from 0: the stage holds no layers"),
        ("--pipeline-model-parallel-size 5 --pipeline-model-parallel-layout E|t|t||tL",
         "--pipeline-model-parallel-layout", "stage 3, counted from 0"),
        ("--pipeline-model-parallel-size 5", "--pipeline-model-parallel-size", "stage 3, counted from 0"),
        ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 3",
         "--decoder-first-pipeline-num-layers", "stage 1, counted from 0"),
        ("--pipeline-model-parallel-size 3 --decoder-last-pipeline-num-layers 3 --decoder-first-pipeline-num-layers 0",
         "--decoder-first-pipeline-num-layers", "stage 1, counted from 0"),
        ("--seq-length 3 --tensor-model-parallel-size 5", "--tensor-model-parallel-size", "needs a token per rank"),
        ("--hetero-process-meshes 1 1 1 1 2 1 1 1 1 1 --hetero-pipeline-layer-split 1 0 2",
         "--hetero-pipeline-layer-split", "stage 1, counted from 0"),
        ("--seq-length 3 --hetero-process-meshes 1 1 1 1 1 5 1 1 1 1 --hetero-pipeline-layer-split 1 2",
         "--hetero-process-meshes", "mesh 1, counted from 0"),
        ("--hetero-process-meshes 1 2 1 1 1 --hetero-pipeline-layer-split 3 --cp-comm-type a2a+p2p",
         "--cp-comm-type", "process meshes do not say"),
    ],
)  # fmt: skip
def test_laws_of_plans_are_reported_by_flag(flags: str, field: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        configure(f"{GRID} --seq-length 64 {flags}".split(), {})
    assert caught.value.field == field
