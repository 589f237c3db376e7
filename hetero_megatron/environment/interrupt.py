"""To be imported by programs before anything else: from then on Ctrl-C ends the process at once, in one line.

A KeyboardInterrupt in the middle of an import is caught by some library, or lost in a callback of the interpreter, and
the program goes on as if nothing had been; so no exception carries it. The command's own handling takes over where its
modules are there (``release``), or that of a run, before its first step. Until the last line here has run, Ctrl-C is an
exception; so what is imported here is loaded when Python has started.
"""

import _signal  # type: ignore[import-not-found]  # of C: ``signal`` itself is a module that takes a while
import os
import sys

_EXIT_CODE = 128 + _signal.SIGINT  # ``errors.INTERRUPTED``
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # by which a launcher numbers its processes


def _end(number: int, frame: object) -> None:
    launcher = sys.modules.get("hetero_megatron.environment.launcher")
    if launcher is not None and hasattr(launcher, "is_first"):
        first = launcher.is_first()
    else:
        first = next((os.environ[name] for name in _RANKS if name in os.environ), "0").strip() == "0"
    if first:
        os.write(2, b"error: interrupted\n")
    os._exit(_EXIT_CODE)


def release() -> None:
    """Ctrl-C is an exception again, for commands that clean up after themselves."""
    if _signal.getsignal(_signal.SIGINT) is _end:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # not where it is ignored, as in the background
    _signal.signal(_signal.SIGINT, _end)
