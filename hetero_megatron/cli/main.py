"""``hetero-megatron``: one sub-command per task."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence

from hetero_megatron.errors import UserError

_NOT_BUILT = {
    "plan": "search for the best plan",
    "predict": "simulate one plan",
    "calibrate": "measure chips and links",
    "testbed": "emulate a cluster on this machine",
    "plugins": "list and check platforms",
    "report": "a page about a run",
}


def _doctor(argv: Sequence[str]) -> int:
    from hetero_megatron.cli.doctor import main as doctor

    return doctor(argv)


def _convert(argv: Sequence[str]) -> int:
    from hetero_megatron.cli.convert import main as convert

    return convert(argv)


def _run(argv: Sequence[str]) -> int:
    from hetero_megatron.cli.run import main as run

    return run(argv)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "doctor": (_doctor, "what this machine has, what is missing, how to mend it"),
    "convert": (_convert, "Hugging Face directory <-> native checkpoint"),
    "run": (_run, "start the ranks of a plan here, and go on when some fail"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    try:
        return _command(words[0])(words[1:])
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name in _COMMANDS:
        return _COMMANDS[name][0]
    if name in _NOT_BUILT:
        raise UserError("not built yet", field="command", value=name, accepted=", ".join(_COMMANDS))
    near = difflib.get_close_matches(name, [*_COMMANDS, *_NOT_BUILT], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"no such command{hint}", field="command", value=name, accepted=", ".join(_COMMANDS))


def _usage() -> str:
    lines = ["usage: hetero-megatron COMMAND ...", ""]
    lines += [f"  {name:<10} {text}" for name, (_, text) in _COMMANDS.items()]
    lines += ["", "not built yet: " + ", ".join(_NOT_BUILT), "training: python pretrain_gpt.py --help"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
