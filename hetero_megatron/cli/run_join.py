"""``hetero-megatron run --join``: this host becomes part of a running elastic job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hetero_megatron.cli.arguments import refuse_empty
from hetero_megatron.errors import UserError

FLAGS = ("--join", "--node", "--nproc-per-node", "--cluster")
MOST_RANKS = 1 << 16


def join(argv: Sequence[str], program: Sequence[str]) -> int:
    """This host's part of a running job; ``program``: what starts a rank. Returns the exit code."""
    from hetero_megatron.launch.joining import Joining

    options: dict[str, str] = {}
    words = list(argv)
    while words:
        name, separator, value = words.pop(0).partition("=")
        if name not in FLAGS:
            raise UserError("unknown flag beside --join", field=name, accepted=", ".join(FLAGS))
        if not separator and (not words or words[0].startswith("--")):
            raise UserError("has no value", field=name, accepted="--flag VALUE")
        options[name] = value if separator else words.pop(0)
    refuse_empty(argv)
    count = options.get("--nproc-per-node")
    if count is not None and not (count.isascii() and count.isdigit() and 0 < int(count) <= MOST_RANKS):
        accepted = f"1 to {MOST_RANKS}"
        raise UserError("is not a number of ranks", field="--nproc-per-node", value=count, accepted=accepted)
    cluster = Path(options["--cluster"]) if "--cluster" in options else None
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    chips = int(count) if count is not None else None
    return Joining(Path(options["--join"]), options.get("--node"), chips, cluster, program, log).run()
