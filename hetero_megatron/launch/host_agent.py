"""The agent of one host of an elastic job, as the launcher starts it through ssh.

    HETERO_JOB_SECRET=... python -m hetero_megatron.launch.host_agent '{"job": {...}, "node": "a", "chips": 1, ...}'
"""

from __future__ import annotations

import json
import os
import sys

from hetero_megatron.environment.launcher import SECRET
from hetero_megatron.errors import UserError
from hetero_megatron.launch.joining import JobFile, Joining
from hetero_megatron.launch.supervise import USER_ERROR


def main(argument: str) -> int:
    """Exit code of the host's part of the job."""
    settings = json.loads(argument)
    job = JobFile(**settings["job"], secret=os.environ[SECRET])
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    found, node = ("--via", "ssh"), settings["node"]
    try:
        return Joining(job, node, settings["chips"], None, settings["program"], log, found=found).run()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
