"""Megatron's flags about checkpoints, and ours about Hugging Face weights."""

from hetero_megatron.cli.flag import notice, refused, value

DTYPES = ("fp32", "bf16", "fp16", "fp64")
_WHY = "checkpoints are not built yet"
_NONE = "no checkpoint is written or read by this version"

FLAGS = (
    value("--save", str, None, "directory of the run: metrics.jsonl is written there"),
    refused("--load", _WHY, "leave it out: training starts from --seed", nargs=1),
    value("--load-hf", str, None, "directory of a Hugging Face model: its weights, and its config without --model"),
    value("--save-hf", str, None, "new directory: the trained weights as a Hugging Face model, at the end"),
    value("--save-hf-dtype", str, None, "dtype of its files; that of training if left out", choices=DTYPES),
    refused("--save-interval", _WHY, nargs=1),
    refused("--save-retain-interval", _WHY, nargs=1),
    refused("--ckpt-step", _WHY, nargs=1),
    refused("--finetune", _WHY),
    refused("--pretrained-checkpoint", _WHY, nargs=1),
    refused("--use-checkpoint-args", _WHY),
    refused("--exit-on-missing-checkpoint", _WHY),
    refused("--non-persistent-save-interval", _WHY, nargs=1),
    notice("--ckpt-format", _NONE, nargs=1),
    *(notice(name, _NONE) for name in ("--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng")),
    notice("--async-save", _NONE),
    notice("--use-persistent-ckpt-worker", _NONE),
    notice("--ckpt-fully-parallel-save", _NONE),
    notice("--ckpt-fully-parallel-load", _NONE),
    notice("--ckpt-assume-constant-structure", _NONE),
    notice("--dist-ckpt-strictness", _NONE, nargs=1),
    notice("--dist-ckpt-optim-fully-reshardable", _NONE),
    notice("--auto-detect-ckpt-format", _NONE),
)
