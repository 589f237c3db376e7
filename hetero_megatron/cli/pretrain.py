"""What ``pretrain_gpt.py`` does: flags -> configuration -> a dry run or a training run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.training.exit import INTERRUPTED

if TYPE_CHECKING:
    from hetero_megatron.training.config import RunConfig

USER_ERROR = 2  # exit code of every refusal, on every rank
PEER_ERROR = 3  # a peer died or does not answer


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code; a refusal is one line on standard error."""
    if "-h" in argv or "--help" in argv:
        from hetero_megatron.cli.flags import help_text

        print(help_text())
        return 0
    if "--version" in argv:
        from hetero_megatron.cli.arguments import version_line

        print(version_line())
        return 0
    try:
        from hetero_megatron.cli.configure import configure

        config = configure(argv, environment)
        if config.dry_run:
            return dry_run(config, environment)
        # Only now: importing torch takes seconds, and a refusal should not.
        from hetero_megatron.training.loop import train

        return train(config)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return USER_ERROR
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except RuntimeError as error:
        from hetero_megatron.comm.errors import CommError
        from hetero_megatron.training.diagnosis import leave_diagnosis

        if not isinstance(error, CommError):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        leave_diagnosis(error, environment)
        return PEER_ERROR


def dry_run(config: RunConfig, environment: Mapping[str, str]) -> int:
    """Print the plan, memory per rank and the notices; with --as-rank run that rank with fake tensors (rank 0 only)."""
    from hetero_megatron.cluster import format_bytes
    from hetero_megatron.plan import format_plan
    from hetero_megatron.plan.islands import format_islands
    from hetero_megatron.planner.footprint import estimate_memory, format_memory
    from hetero_megatron.planner.memory import moments_of

    if environment.get("RANK", "0") != "0":
        return 0
    cluster = config.cluster
    print(format_plan(config.plan, config.spec, None if cluster is None else [r.chip for r in cluster.ranks]))
    if config.plan.islands:
        print(format_islands(config.plan, config.spec))
    for sentence in config.notices:
        print(f"notice: {sentence}")
    moments = moments_of(config.optimizer.name)
    memory = estimate_memory(config.plan, config.spec, config.dtype, moments, logits_bytes=config.logits_bytes)
    print(format_memory(memory))
    if cluster is not None:
        for rank, needs in memory.items():
            has = cluster.chip_of(rank).memory
            if needs.total > has:
                over = format_bytes(needs.total - has)
                print(f"notice: rank {rank} is {over} over the memory of {cluster.chip_of(rank).name}")
    if config.as_rank is not None:
        from hetero_megatron.training.dry_run import format_dry_run, run_rank

        print(format_dry_run(run_rank(config, config.as_rank), config), flush=True)
    return 0
