"""Every flag, by group. A flag stands in exactly one group."""

from collections.abc import Mapping

from hetero_megatron.cli.flags.flag import Flag
from hetero_megatron.cli.flags.table import (
    checkpoint,
    data,
    finetune,
    logging,
    model,
    moe,
    parallel,
    training,
)

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Plan and run": parallel.PLAN,
    "Model": model.FLAGS,
    "Mixture of experts": moe.FLAGS,
    "Parallelism": parallel.FLAGS,
    "Unlike chips (FlagScale)": parallel.HETERO,
    "Training": training.TRAINING,
    "Precision": training.PRECISION,
    "Recompute": training.RECOMPUTE,
    "Data and tokenizer": data.FLAGS,
    "Fine-tuning": finetune.FLAGS,
    "Distillation": finetune.DISTILLATION,
    "Checkpoint": checkpoint.FLAGS,
    "Logs, exits and faults": logging.FLAGS,
    "Precision alignment": logging.ALIGNMENT,
}
ALL: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)
