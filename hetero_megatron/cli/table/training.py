"""Megatron's flags about training, optimizer, learning rate, precision and recompute."""

from hetero_megatron.cli.flag import notice, only, refused, switch, value

_FP8 = "fp8 is not supported by this version"
_STATE = "nothing is loaded by this version, so there is no schedule in a checkpoint to choose against"
_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

TRAINING = (
    value("--micro-batch-size", int, None, "sequences of a micro-batch"),
    value("--global-batch-size", int, None, "sequences per step; micro-batch size x data parallel if left out"),
    value("--rampup-batch-size", int, None, "START INCREMENT SAMPLES: grow the batch; needs --train-samples", nargs=3),
    value("--train-iters", int, None, "steps"),
    value("--train-samples", int, None, "sequences, instead of --train-iters"),
    value("--optimizer", str, "adam", "adam is AdamW", choices=("adam", "sgd")),
    value("--lr", float, None, "learning rate after warm-up"),
    value("--min-lr", float, 0.0, "learning rate at the end"),
    value("--lr-decay-style", str, "linear", "shape of the decay", choices=_STYLES),
    value("--lr-decay-iters", int, None, "steps until --min-lr; the length of training if left out"),
    value("--lr-decay-samples", int, None, "the same in sequences"),
    value("--lr-warmup-fraction", float, None, "warm-up as a share of the decay"),
    value("--lr-warmup-iters", int, 0, "warm-up in steps"),
    value("--lr-warmup-samples", int, 0, "warm-up in sequences"),
    value("--lr-warmup-init", float, 0.0, "learning rate at the start of warm-up"),
    value(
        "--lr-wsd-decay-style",
        str,
        "exponential",
        "shape of the last part of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    value("--lr-wsd-decay-iters", int, None, "steps of the last part of WSD"),
    value("--lr-wsd-decay-samples", int, None, "the same in sequences"),
    value("--weight-decay", float, 0.01, "decoupled weight decay; biases and norms have none"),
    value("--start-weight-decay", float, None, "weight decay at the start, where it grows"),
    value("--end-weight-decay", float, None, "weight decay at the end, where it grows"),
    value(
        "--weight-decay-incr-style",
        str,
        "constant",
        "how weight decay grows",
        choices=("constant", "linear", "cosine"),
    ),
    value("--clip-grad", float, 1.0, "largest norm of the gradient; 0: no clipping"),
    value("--adam-beta1", float, 0.9, "decay of the first moment"),
    value("--adam-beta2", float, 0.999, "decay of the second moment"),
    value("--adam-eps", float, 1e-8, "added to the root of the second moment"),
    value("--sgd-momentum", float, 0.9, "momentum of --optimizer sgd"),
    notice("--override-opt_param-scheduler", _STATE),
    notice("--use-checkpoint-opt_param-scheduler", _STATE),
    notice(
        "--calculate-per-token-loss",
        "the loss is always the sum over tokens divided by their number",
        differs="off in Megatron, which averages means of micro-batches; that would depend on the plan",
    ),
    value("--seed", int, 1234, "of initial weights and of the order of samples"),
    notice("--manual-gc", "it changes neither results nor what must fit into memory"),
    notice("--manual-gc-interval", "it changes neither results nor what must fit into memory", nargs=1, type=int),
    notice("--empty-unused-memory-level", "it does not change results", nargs=1, type=int),
    switch("--deterministic-mode", "refuse operators that do not give the same bits every time"),
    notice("--use-cpu-initialization", "initial weights are always drawn on the CPU, whatever the plan"),
    refused("--data-parallel-random-init", "initial weights never depend on the plan"),
    notice("--no-gradient-accumulation-fusion", "gradients of 16-bit weights are always accumulated in fp32"),
    switch("--skip-train", "only evaluate"),
    value("--eval-iters", int, 100, "global batches per evaluation"),
    value(
        "--eval-interval",
        int,
        None,
        "steps between evaluations; none if left out",
        differs="1000 in Megatron; here nothing is evaluated unless asked for",
    ),
)

PRECISION = (
    switch("--bf16", "bfloat16 weights and activations, fp32 masters and gradients"),
    switch("--fp16", "half precision with loss scaling, fp32 masters and gradients"),
    switch("--fp64", "double precision, for proofs"),
    value("--loss-scale", float, None, "constant loss scale of --fp16; dynamic if left out"),
    value("--initial-loss-scale", float, 2.0**32, "dynamic loss scale at the start"),
    value("--min-loss-scale", float, 1.0, "dynamic loss scale at least"),
    value("--loss-scale-window", int, 1000, "steps without overflow before the loss scale doubles"),
    value("--hysteresis", int, 2, "overflows before the loss scale halves"),
    refused("--fp8-format", _FP8, "--bf16", nargs=1),
    refused("--fp8-recipe", _FP8, "--bf16", nargs=1),
    refused("--fp8-amax-history-len", _FP8, "--bf16", nargs=1),
    refused("--fp8-amax-compute-algo", _FP8, "--bf16", nargs=1),
    notice("--accumulate-allreduce-grads-in-fp32", "gradients are always accumulated and reduced in fp32 or better"),
    refused("--grad-reduce-in-bf16", "gradients are always reduced in fp32 or better"),
)

RECOMPUTE = (
    value("--recompute-granularity", str, None, "what backward computes again", choices=("full", "selective")),
    value(
        "--recompute-method",
        str,
        None,
        "uniform: all layers, one by one; block: the first layers of a stage",
        choices=("uniform", "block"),
    ),
    value("--recompute-num-layers", int, None, "layers of the block method; 1 with uniform"),
    switch("--recompute-activations", "the same as --recompute-granularity selective"),
    only(
        "--recompute-modules",
        str,
        ("core_attn",),
        "selective recompute means attention here",
        "core_attn, or leave the flag out",
        nargs="+",
    ),
    refused("--distribute-saved-activations", "saved activations stay where they are"),
)
