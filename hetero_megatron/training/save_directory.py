"""What a run writes to, looked at before it starts: no other run's --save, nothing lost by writing, and folders that
can be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import CheckpointConfig, RunConfig
from hetero_megatron.utils.text import notice_line

if TYPE_CHECKING:
    from hetero_megatron.checkpoint.lock import DirectoryLock


def writes_checkpoints(config: RunConfig) -> bool:
    options = config.checkpoint
    return options.save is not None and options.save_interval != 0 and not config.skip_train


def claim_directory(config: RunConfig, group: Group) -> DirectoryLock | None:
    """Called on all ranks of the plan before any work is done; they agree. None: no checkpoints are written.

    Raises:
        UserError: the directory cannot be written by all ranks, another run writes there, or it holds checkpoints that
            this run does not go on from, and would replace as it comes to their steps.
    """
    options = config.checkpoint
    if not writes_checkpoints(config):
        return None
    from hetero_megatron.checkpoint.directory import CheckpointDirectory
    from hetero_megatron.checkpoint.lock import lock_directory
    from hetero_megatron.checkpoint.native import check_writable

    assert options.save is not None
    check_writable(options.save, group)
    lock = lock_directory(options.save, group, config.elastic is not None)
    # Only now: while another run held the lock it may have saved.
    steps = CheckpointDirectory(options.save).held() if group.index == 0 else []
    newest = group.gather_objects(steps[-1] if steps else None, int | None)[0]
    if newest is not None and not options.goes_on:
        _refuse_or_say(options, newest, group)
    return lock


def _refuse_or_say(options: CheckpointConfig, newest: object, group: Group) -> None:
    holds = f"holds checkpoints already, the newest of step {newest}, and this run does not go on from there"
    if options.overwrite:
        if group.index == 0:
            replaced = "those of the steps that it saves are replaced"
            print(notice_line(f"--save {options.save} {holds}: {replaced}"), flush=True)
        return
    go_on = f"--load {options.save} to go on from there" + (", without --finetune" if options.finetune else "")
    raise UserError(
        f"{holds}: it would replace those of the steps that it saves", field="--save", value=options.save,
        accepted=f"{go_on}; another directory; or --overwrite-checkpoints to replace them",
    )  # fmt: skip


def make_folders(config: RunConfig, group: Group) -> None:
    """Make the folders of all other outputs; called on all ranks of the plan, which refuse together.

    Raises:
        UserError: one cannot be made or written.
    """
    folders = {"--dump-layers": config.alignment.dump, "--capture-operators": config.alignment.capture}
    if group.index == 0:
        folders |= {"--save": config.logging.save, "--tensorboard-dir": config.logging.tensorboard_dir}
    folder_problems = [(flag, path, _unwritable(Path(path))) for flag, path in folders.items() if path is not None]
    problem_here = next((problem for problem in folder_problems if problem[2]), None)
    problems = group.gather_objects(problem_here, tuple[str, str, str] | None)
    for rank, problem_of_rank in zip(group.ranks, problems, strict=True):
        if problem_of_rank is not None:
            flag, path, reason = problem_of_rank
            problem = f"cannot be written on rank {rank}: {reason}"
            raise UserError(problem, field=flag, value=path, accepted="a folder with write permission")


def _unwritable(folder: Path) -> str:
    """Why the folder cannot be made or written; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
