"""Entry points of the programs: settings that must hold before slow imports."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

from hetero_megatron.launcher import is_first
from hetero_megatron.training.exit import INTERRUPTED, at_once, end_with_parent, outlive_terminal


def console() -> int:
    """``hetero-megatron``. Returns the exit code."""
    try:
        outlive_terminal()
        with at_once():
            from hetero_megatron.cli.main import main
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED


def pretrain() -> NoReturn:
    """``pretrain_gpt.py``, however it is started."""
    code = INTERRUPTED
    with suppress(KeyboardInterrupt):
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent
            end_with_parent()
        outlive_terminal()
        with at_once(is_first()):
            from hetero_megatron.cli.pretrain import main
        code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    # Not sys.exit: gloo's threads may still be dropping tensors, and one that asks for the interpreter's lock while it
    # shuts down aborts the process ("terminate called without an active exception").
    os._exit(code)
