"""What a run writes besides checkpoints when it ends: --save-hf and --save-adapter."""

from __future__ import annotations

import torch

from hetero_megatron.checkpoint.hf_save import save_hf
from hetero_megatron.monitoring.reporter import Reporter
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.spec import logical_tensors
from hetero_megatron.training.checkpointing import Checkpointing
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.initial_weights import InitialWeights
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.utils.text import notice_line


def export(
    config: RunConfig,
    step: int,
    runtime: Runtime,
    weights: InitialWeights,
    checkpoints: Checkpointing,
    reporter: Reporter,
) -> None:
    """Write what was asked for, unless the run was stopped to go on later. Called on all ranks of the plan.

    Args:
        step: optimizer steps that are done.

    Raises:
        UserError: a directory cannot be written.
    """
    directories = {"--save-hf": config.save_hf, "--save-adapter": config.adapter.save}
    if checkpoints.active and step < config.steps:  # stopped: the directories must be free then
        for flag, directory in directories.items():
            if directory is not None:
                reporter.say(notice_line(f"{flag} {directory} is written at the end of training, step {config.steps}"))
        return
    adapters = weights.adapters
    if adapters is not None and config.adapter.save is not None:
        reporter.say(adapters.save(runtime))
    if config.save_hf is None:
        return
    dtypes = _dtypes(config, checkpoints.source_dtypes if adapters is None else weights.dtypes)
    if adapters is not None:
        reporter.say(adapters.save_merged(runtime, dtypes, checkpoints.model_files))
    else:
        owned = runtime.owned()
        reporter.say(save_hf(config.save_hf, config.spec, owned, dtypes, runtime.world, checkpoints.model_files))


def _dtypes(config: RunConfig, source: dict[str, torch.dtype] | None) -> dict[str, torch.dtype]:
    """Of each tensor of --save-hf: --save-hf-dtype, else that of its ``source``, else the run's."""
    if config.save_hf_dtype is None and source is not None:
        return source
    names = [tensor.name for tensor in logical_tensors(config.spec.base)]
    return dict.fromkeys(names, DTYPES[config.save_hf_dtype or config.dtype])
