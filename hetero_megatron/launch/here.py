"""``--nproc-per-node N``: the ranks of a job on this host, by torchrun's elastic agent, without torchrun's own words.

What ends a rank has been said by it, in one line; torchrun adds a traceback of itself and a table.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def start_here(words: Sequence[str], count: int) -> int:
    """Start ``python words`` once per rank, and wait.

    Returns:
        the exit code: 0, that of the rank that failed first, or 128 + the signal that ended it or this process.
    """
    logging.disable(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning
    config = LaunchConfig(
        1, 1, count, role="default", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        run_id=f"here-{os.getpid()}",
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was ended by {name}", file=sys.stderr, flush=True)
            return 128 - failure.exitcode
        return int(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
