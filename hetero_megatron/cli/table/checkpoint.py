"""Megatron's flags about checkpoints, and ours about Hugging Face weights."""

from hetero_megatron.cli.flag import notice, refused, switch, value
from hetero_megatron.cluster.catalogue import DTYPES

_ONE = "there is one format, which any plan reads and writes"
_SEED = "all randomness is a function of --seed and the position, so no generator has a state"
_CONVERT = "checkpoints are converted by a command of its own"
_LOCAL = "all checkpoints are persistent"

FLAGS = (
    value("--save", str, None, "directory of the run: metrics.jsonl and checkpoints are written there"),
    switch(
        "--overwrite-checkpoints",
        "begin anew in a --save that holds checkpoints, and replace those of equal steps; refused without",
        differs="Megatron always replaces them; here another run's checkpoints are not lost by mistake",
    ),
    value("--load", str, None, "directory to go on from: its latest checkpoint, of whatever plan, if it holds one"),
    value(
        "--load-hf", str, None,
        "directory of a Hugging Face model, or its name on the hub: its weights, and its config without --model",
    ),
    value("--save-hf", str, None, "new directory: the trained weights as a Hugging Face model, at the end"),
    value(
        "--save-hf-dtype", str, None,
        "dtype of its files; if left out each tensor's where it came from (--load-hf, --load), else that of training",
        choices=DTYPES,
    ),
    value(
        "--save-interval", int, None,
        "steps between checkpoints; at the end of a run, or when it is stopped, one is written anyway; 0: none at all",
    ),
    value("--keep-checkpoints", int, 0, "how many checkpoints stay in --save, the newest ones; 0: all"),
    value("--save-retain-interval", int, None, "with --keep-checkpoints: those of multiples of this step stay as well"),
    value("--ckpt-step", int, None, "with --load: the checkpoint of this step instead of the latest"),
    switch("--finetune", "with --load: only the weights; training starts at step 0 with a new optimizer"),
    value("--pretrained-checkpoint", str, None, "as with --finetune from here, where --load holds no checkpoint"),
    switch("--exit-on-missing-checkpoint", "refuse a --load without checkpoints, instead of starting at step 0"),
    switch(
        "--load-previous-on-corruption",
        "take the newest good checkpoint before a damaged one, with a notice, instead of refusing it",
    ),
    switch("--no-save-optim", "leave the optimizer's state out of checkpoints"),
    switch("--no-load-optim", "with --load: a new optimizer; step and position in the data are the checkpoint's"),
    switch("--sync-save", "training waits until a checkpoint is written"),
    notice("--async-save", "checkpoints are written while training goes on, unless --sync-save is given",
           differs="off in Megatron; here it is the default"),
    refused("--use-checkpoint-args", "flags are not read from checkpoints", "give the flags"),
    refused("--non-persistent-save-interval", _LOCAL, "--save-interval", nargs=1),
    notice("--ckpt-format", _ONE, nargs=1),
    notice("--dist-ckpt-format", _ONE, nargs=1),
    notice("--use-dist-ckpt", _ONE),
    refused("--ckpt-convert-format", _CONVERT, "hetero-megatron convert", nargs=1),
    refused("--ckpt-convert-save", _CONVERT, "hetero-megatron convert", nargs=1),
    refused("--non-persistent-ckpt-type", _LOCAL, "--save-interval", nargs=1),
    notice("--no-save-rng", _SEED),
    notice("--no-load-rng", _SEED),
    notice("--use-persistent-ckpt-worker", "the writer is a thread of each rank"),
    notice("--ckpt-fully-parallel-save", "every rank always writes what it owns"),
    notice("--no-ckpt-fully-parallel-save", "every rank always writes what it owns"),
    notice("--ckpt-fully-parallel-load", "every rank always reads what it owns"),
    notice("--ckpt-assume-constant-structure", _ONE),
    notice("--dist-ckpt-strictness", "what is missing or unexpected is always refused", nargs=1),
    notice("--dist-ckpt-optim-fully-reshardable", "it always is"),
    notice("--auto-detect-ckpt-format", _ONE),
)  # fmt: skip
