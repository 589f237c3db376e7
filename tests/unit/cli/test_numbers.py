"""Every number flag of every command has a range: tried at both ends, beyond them, and with odd spellings."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from hetero_megatron.cli.arguments import CommandParser, Number
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.flags.flag import NOTICE, SUPPORTED, Flag
from hetero_megatron.cli.flags.parse import parse
from hetero_megatron.cli.flags.table import ALL
from hetero_megatron.cli.main import COMMANDS, entry
from hetero_megatron.errors import UserError

NO_NUMBERS = ("nan", "inf", "-inf", "infinity", "1_0", "١", "１", "0x10", "", " ", "1,5", "--", "1e", "e5", "1e400",
              "9" * 5000, "1e99999", "true", "½", "1 2", "\t1", "1\n", "+", ".")  # fmt: skip
ODD = ("1e308", "-1e308", "1e-320", "-0.0", str(10**30), str(-(10**30)), "0", "-1", "+1", " 1 ", "1e-308", "5e-324")
BASE = {
    "--num-layers": "2", "--hidden-size": "16", "--num-attention-heads": "4", "--vocab-size": "100",
    "--seq-length": "32", "--micro-batch-size": "1", "--global-batch-size": "4", "--train-iters": "3", "--lr": "1e-3",
}  # fmt: skip
NUMBERS = [flag for flag in ALL if flag.status == SUPPORTED and flag.type in (int, float) and flag.nargs != 0]


def ends(least: float | None, most: float | None, above: float | None, below: float | None) -> tuple[list, list]:
    """(numbers inside: at the ends; numbers outside: the next ones beyond)."""
    inside, outside = [], []
    for bound, sign in ((least, -1), (most, 1)):
        if bound is not None:
            inside.append(bound)
            outside.append(bound + sign if isinstance(bound, int) else math.nextafter(bound, sign * math.inf))
    for bound, sign in ((above, 1), (below, -1)):
        if bound is not None:
            outside.append(bound)
            inside.append(math.nextafter(bound, sign * math.inf))
    return inside, outside


def words_of(flag: Flag, word: str) -> list[str]:
    """A line with the flag: its value as often as it takes one."""
    times = flag.nargs if isinstance(flag.nargs, int) else 1
    base = [part for name, value in BASE.items() if name != flag.name for part in (name, value)]
    return [*base, "--mock-data", "--dry-run", flag.name, *[word] * times]


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.name)
def test_flags_of_training(flag: Flag) -> None:
    if not flag.choices:
        low, high = (flag.least, flag.above), (flag.most, flag.below)
        assert any(b is not None for b in low) and any(b is not None for b in high), "a number has a range"
    inside, outside = ends(flag.least, flag.most, flag.above, flag.below)
    for value in inside if not flag.choices else ():
        parse(words_of(flag, repr(flag.type(value))))
    for value in outside:
        with pytest.raises(UserError, match=flag.name):
            parse(words_of(flag, repr(flag.type(value))))
    for word in NO_NUMBERS:
        with pytest.raises(UserError) as refused:
            parse(words_of(flag, word))
        assert flag.name in str(refused.value) or "belongs to no flag" in str(refused.value)
    for word in (*ODD, *(repr(flag.type(value)) for value in (*inside, *outside))):
        try:  # whatever it is: accepted, or refused in one line; nothing else is raised
            configure(words_of(flag, word), {"WORLD_SIZE": "1"})
        except UserError as error:
            assert len(str(error).splitlines()) == 1


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Those of all commands, as each makes it before it reads its words."""
    made: list[CommandParser] = []
    before = CommandParser.__init__

    def note(self: CommandParser, *args: object, **kwargs: object) -> None:
        made.append(self)
        before(self, *args, **kwargs)  # type: ignore[arg-type]

    words = {"comm": [["check", "--help"]], "cluster": [["discover", "--help"]],
             "plan": [["--help"], ["--context-only", "--help"]]}  # fmt: skip
    CommandParser.__init__ = note  # type: ignore[method-assign]
    try:
        for name in COMMANDS:
            made.clear()
            for line in words.get(name, [["--help"]]):
                with suppress(SystemExit, UserError):
                    entry(name)(line)
            yield from ((name, parser) for parser in made)
    finally:
        CommandParser.__init__ = before  # type: ignore[method-assign]


def test_flags_of_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    seen = 0
    for name, parser in parsers():
        for action in parser._actions:
            assert action.type not in (int, float), (name, action.option_strings)
            if not isinstance(action.type, Number):
                continue
            seen += 1
            number = action.type
            low, high = (number.least, number.above), (number.most, number.below)
            assert any(b is not None for b in low) and any(b is not None for b in high), (name, action.option_strings)
            inside, outside = ends(number.least, number.most, number.above, number.below)
            for value in inside:
                assert number(repr(number.kind(value))) == value
            for word in (*(repr(number.kind(value)) for value in outside), *NO_NUMBERS):
                with pytest.raises(argparse.ArgumentTypeError):
                    number(word)
            for word in ODD:
                try:
                    number(word)
                except argparse.ArgumentTypeError as error:
                    assert "accepted" in str(error) or "is not" in str(error)
            if action.default is not None and not isinstance(action.default, list):
                assert number(repr(action.default)) == action.default
    assert seen > 40
    capsys.readouterr()


def test_numbers_of_other_places() -> None:
    """Flags that commands read by themselves."""
    run = ["--plan", "p", "--", "--model", "tiny"]
    from hetero_megatron.cli.run import _number as of_run
    from hetero_megatron.cli.start import start_ranks
    from hetero_megatron.cli.testbed import _number as of_testbed

    for word in (*NO_NUMBERS, "-1", "1e308", str(10**30)):
        with pytest.raises(UserError, match="--grace"):
            of_run({"--grace": word}, "--grace", 1)
        with pytest.raises(UserError, match="--grace"):
            of_testbed("--grace", word, "seconds, 0 or more", 0.0)
        assert start_ranks("pretrain", ["--nproc-per-node", word, *run]) == 2


def test_no_effect_flags_take_any_number() -> None:
    for flag in ALL:
        if flag.status == NOTICE and flag.type in (int, float):
            parse([flag.name, str(sys.maxsize)])
