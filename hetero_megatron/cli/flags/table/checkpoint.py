"""Megatron's flags about checkpoints, and ours about Hugging Face weights."""

from hetero_megatron.cli.flags.flag import count, family, needs, notice, refused, switch, value
from hetero_megatron.cluster.catalogue import DTYPES
from hetero_megatron.utils.text import dtype_name

_ONE = "there is one format, which any plan reads and writes"
_SEED = "all randomness is a function of --seed and the position, so no generator has a state"
_CONVERT = "checkpoints are converted by a command of its own"
_LOCAL = "all checkpoints are persistent"
_SAVE, _LOAD = needs("--save"), needs("--load")

FLAGS = (
    value("--save", str, None, "directory of the run: metrics.jsonl and checkpoints are written there"),
    switch(
        "--overwrite-checkpoints",
        "begin anew in a --save that holds checkpoints, and replace those of equal steps; refused without",
        differs="Megatron always replaces them; here another run's checkpoints are not lost by mistake",
        needs=_SAVE,
    ),
    value("--load", str, None, "directory to go on from: its latest checkpoint, of whatever plan, if it holds one"),
    value(
        "--load-hf", str, None,
        "directory of a Hugging Face model, or its name on the hub: its weights, and its config without --model",
    ),
    value("--save-hf", str, None, "new directory: the trained weights as a Hugging Face model, at the end"),
    value(
        "--save-hf-dtype", dtype_name, None,
        "dtype of its files; if left out each tensor's where it came from (--load-hf, --load), else that of training",
        choices=DTYPES, needs=needs("--save-hf"),
    ),
    count(
        "--save-interval", None,
        "steps between checkpoints; at the end of a run, or when it is stopped, one is written anyway; 0: none at all",
        least=0, aliases=("--persistent-save-interval",), needs=_SAVE,
    ),
    count("--keep-checkpoints", 0, "how many checkpoints stay in --save, the newest ones; 0: all", least=0,
            needs=_SAVE),
    count("--save-retain-interval", None, "with --keep-checkpoints: those of multiples of this step stay as well",
          needs=_SAVE + needs("--keep-checkpoints")),
    count("--ckpt-step", None, "with --load: the checkpoint of this step instead of the latest", least=0, needs=_LOAD),
    switch("--finetune", "with --load: only the weights; training starts at step 0 with a new optimizer",
           needs=needs("--load", "--pretrained-checkpoint")),
    value("--pretrained-checkpoint", str, None, "as with --finetune from here, where --load holds no checkpoint"),
    switch("--exit-on-missing-checkpoint", "refuse a --load without checkpoints, instead of starting at step 0",
            needs=_LOAD),
    switch(
        "--load-previous-on-corruption",
        "take the newest good checkpoint before a damaged one, with a notice, instead of refusing it",
        needs=needs("--load", "--pretrained-checkpoint"),
    ),
    switch("--no-save-optim", "leave the optimizer's state out of checkpoints", needs=_SAVE),
    switch("--no-load-optim", "with --load: a new optimizer; step and position in the data are the checkpoint's",
           needs=_LOAD),
    switch("--sync-save", "training waits until a checkpoint is written", needs=_SAVE),
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
    *family(refused,
            "--non-persistent-global-ckpt-dir= --non-persistent-local-ckpt-dir= --non-persistent-local-ckpt-algo=",
            _LOCAL, "--save-interval"),
    *family(refused, "--use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args/"
            "--disable-use-tokenizer-model-from-checkpoint-args", "flags are not read from checkpoints",
            "give the flags"),
    *family(refused, "--override-ckpt-iteration=", "the step belongs to the checkpoint", "--finetune starts at step 0"),
    *family(refused, "--load-main-params-from-ckpt",
            "masters are always those of the checkpoint", "leave the flag out, or --no-load-optim"),
    *family(refused, "--ckpt-convert-update-legacy-dist-opt-format --dist-ckpt-save-pre-mcore-014 "
            "--no-stream-ckpt-dequant/--disable-stream-ckpt-dequant", "Megatron's checkpoints are not read or written",
            "hetero-megatron convert, from or to a Hugging Face model"),
    *family(refused, "--replication --replication-jump= --replication-factor=", _LOCAL,
            "--save on a shared file system"),
    *family(refused, "--save-params-interval= --save-activations-interval= --save-tokens-per-expert-interval= "
            "--save-wgrads-interval= --save-dgrads-interval=", "this is not written step by step",
            "--dump-layers and --capture-operators for the first steps"),
    *family(notice, "--async-strategy= --async-ckpt-cpu-priority= --async-ckpt-io-priority= --async-ckpt-use-cpu-shm "
            "--dist-ckpt-workers=", "the writer is a thread of each rank"),
    *family(notice, "--ckpt-fully-parallel-load-exchange-algo= --ckpt-fully-parallel-save-process-group= "
            "--ckpt-fully-parallel-load-process-group= --distrib-optim-fully-reshardable-mem-efficient",
            "every rank always reads and writes what it owns"),
    *family(notice, "--verify-integrity", "checksums are always written and checked"),
    *family(refused, "--no-ckpt-load-validate-sharding-integrity/--disable-ckpt-load-validate-sharding-integrity "
            "--no-strict-fsdp-dtensor-load/--disable-strict-fsdp-dtensor-load",
            "what is missing or unexpected in a checkpoint is always refused"),
)  # fmt: skip
