"""Parses a command line into checked values. Exact flag names only.

Words come in, :class:`Arguments` go out, by the rows of ``cli/flags/table/``: type, range, what a flag needs, and why
it is refused stand there. What a value means is said by the builders that receive the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hetero_megatron.cli.arguments import beyond, read_number
from hetero_megatron.cli.flags.config_file import CONFIG, FileWords, placed
from hetero_megatron.cli.flags.flag import NOTICE, REFUSED, Flag, Need, unknown_flag
from hetero_megatron.cli.flags.table import ALL
from hetero_megatron.data import DataConfig
from hetero_megatron.data.config import SPLITS
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import require_text

T = TypeVar("T")
WHERE = "command line"
MAX_WORD = 4096  # as long as a path can be
_TYPES = {int: "an integer", float: "a number", str: "a word"}
_OPTION = re.compile(r"--?[A-Za-z_]")


class Unknown(Exception):
    """A flag was given, and what it says cannot be known; its error is in the list already."""


@dataclass
class Arguments:
    """Values by key (``--num-layers`` is ``num_layers``), including defaults.

    Attributes:
        given: keys of the supported flags on the command line.
        idle: (flag, reason) of flags that were accepted without effect.
        notices: other messages for the start of the run.
        facts: facts about the data, for ``Flag.needs``.
        failed: keys of flags that were given with a value that cannot be taken: reading one raises ``Unknown``.
        places: flag -> file and line, of those that ``--config`` brought.
        generates: nothing is trained, so that modules which predict further tokens have no part in it.
    """

    values: dict[str, Any]
    given: set[str] = field(default_factory=set)
    idle: list[tuple[str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    facts: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    places: Mapping[str, str] = field(default_factory=dict)
    generates: bool = False

    def __getitem__(self, key: str) -> Any:
        if key in self.failed:
            raise Unknown(key)
        return self.values[key]

    def has(self, *keys: str) -> bool:
        """Whether any of them was given."""
        return any(key in self.given for key in keys)

    def all_notices(self) -> tuple[str, ...]:
        """What the run says at its start, flags without effect in one block."""
        return (*idle_notice(self.idle), *dict.fromkeys(self.notices))


def idle_notice(idle: Sequence[tuple[str, str]]) -> list[str]:
    """One notice about all flags without effect: a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in idle:
        if name not in by_reason.setdefault(reason, []):
            by_reason[reason].append(name)
    if len(idle) <= 1:
        return [f"{name} has no effect: {reason}" for name, reason in idle]
    lines = [f"    {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return ["\n".join([f"{sum(map(len, by_reason.values()))} flags have no effect here", *lines])]


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def flag_error(key: str, value: object, problem: str, accepted: str = "") -> UserError:
    """A refusal of the flag with this key."""
    name = next((flag.name for flag in ALL if flag.key == key), flag_name(key))
    return UserError(problem, field=name, value=value, accepted=accepted or "leave the flag out", where=WHERE)


def index(flags: Sequence[Flag] = ALL) -> Mapping[str, Flag]:
    """Flags by every spelling of their names."""
    return {name: flag for flag in flags for name in (flag.name, *flag.aliases)}


def parse(argv: Sequence[str]) -> Arguments:
    """Parse all words; if a flag is repeated the last one counts, as in Megatron, with a notice.

    Raises:
        UserError: unknown or unsupported flags, missing, superfluous or malformed values; all in one message.
    """
    arguments, errors = parse_all(argv)
    if errors:
        raise together(errors)
    return arguments


def parse_all(argv: Sequence[str]) -> tuple[Arguments, list[UserError]]:
    """Arguments, with the errors beside what could be parsed."""
    flags = index()
    arguments = Arguments({flag.key: flag.default for flag in ALL})
    errors = list[UserError]()
    if (name := _config_file(argv)) is not None:
        file = FileWords(name, argv, flags)
        argv, errors, arguments.places = file.words, file.errors, file.places
        arguments.failed, arguments.given = set(file.failed), set(file.failed)
    position = 0
    while position < len(argv):
        try:
            position = _read(argv, position, flags, arguments)
        except _At as stop:
            errors.append(placed(stop.error, arguments.places))
            if (flag := flags.get(argv[position].partition("=")[0])) is not None:
                arguments.failed.add(flag.key)
                arguments.given.add(flag.key)
            position = stop.next
    return arguments, errors


def _config_file(words: Sequence[str]) -> str | None:
    """The file that the command line names, if it does; ill-formed uses are left to what reads the flags."""
    for i, word in enumerate(words):
        flag, separator, value = word.partition("=")
        if flag == CONFIG:
            return value if separator else (words[i + 1] if i + 1 < len(words) else None)
    return None


class _At(Exception):
    """An error of one flag, and the word to continue with."""

    def __init__(self, error: UserError, next: int) -> None:
        super().__init__()
        self.error, self.next = error, next


def _read(argv: Sequence[str], at: int, flags: Mapping[str, Flag], result: Arguments) -> int:
    """Store the flag at a word with its values; returns the position of the next one. Raises _At."""
    name, separator, attached = argv[at].partition("=")
    end = at + 1
    while not separator and end < len(argv) and not _OPTION.match(argv[end]):
        end += 1  # up to the next flag: what an unknown or refused flag may have as values
    try:
        require_text(argv[at], WHERE)
        if not _OPTION.match(name):
            raise UserError("belongs to no flag", field="word", value=argv[at], accepted="--flag value", where=WHERE)
        if name not in flags:
            raise unknown_flag(name, flags, WHERE)
        flag = flags[name]
        word_count = flag.nargs if isinstance(flag.nargs, int) else end
        words = [attached] if separator else list(argv[at + 1 : min(end, at + 1 + word_count)])
        if flag.status == REFUSED:
            raise _refusal(flag, words)
        end = at + 1 + len(words) * (not separator)
        _check_count(flag, words)
        _store(flag, words, result)
    except UserError as error:
        raise _At(error, end) from None
    return end


def _refusal(flag: Flag, words: Sequence[str]) -> UserError:
    """Error for a flag, or a value, that Megatron knows and this version does not support."""
    value = " ".join(words) if words else "given"
    return UserError(flag.help, field=flag.name, value=value, accepted=flag.remedy, where=WHERE)


def together(errors: Sequence[UserError]) -> UserError:
    """One error that lists all errors, grouped by reason; a single one is unchanged.

    Its field, value and remedy are those of the first.
    """
    if len(errors) == 1:
        return errors[0]
    errors = [single for error in errors for single in error.several or (error,)]
    groups: dict[tuple[str, str], list[str]] = {}
    for error in errors:
        setting = error.field if error.value is None else f"{error.field} = {_short(str(error.value))}"
        setting = ": ".join(filter(None, (error.where, setting))) if error.where != WHERE else setting
        groups.setdefault((error.problem, error.accepted), []).append(setting)
    parts = [
        f"{', '.join(dict.fromkeys(names))}: {problem}" + (f" (accepted: {accepted})" if accepted else "")
        for (problem, accepted), names in groups.items()
    ]
    count = sum(len(dict.fromkeys(names)) for names in groups.values())
    first = errors[0]
    nouns = "flags" if all(error.where in ("", WHERE) for error in errors) else "values"
    joined = UserError(f"{count} {nouns} cannot be taken: " + "; ".join(parts), where=WHERE)
    joined.field, joined.value, joined.accepted = first.field, first.value, first.accepted
    joined.several = tuple(errors)
    return joined


def _short(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _check_count(flag: Flag, words: list[str]) -> None:
    is_wrong = len(words) != flag.nargs if isinstance(flag.nargs, int) else flag.nargs == "+" and not words
    if is_wrong:
        count_text = {0: "no value", 1: "one value", "+": "one or more values"}.get(flag.nargs, f"{flag.nargs} values")
        raise UserError(
            "wrong number of values", field=flag.name, value=" ".join(words), accepted=count_text, where=WHERE
        )


def _store(flag: Flag, words: list[str], result: Arguments) -> None:
    values = tuple(_convert(flag, word) for word in words)
    value: Any = True if flag.nargs == 0 else values[0] if flag.nargs == 1 else values
    if flag.status == NOTICE or flag.says:
        result.idle.append((flag.name, flag.says or flag.help))
    if flag.status == NOTICE:
        return
    if flag.key in result.given and result.values[flag.key] != value:
        result.notices.append(f"{flag.name} stands twice: the last value counts")
    result.given.add(flag.key)
    result.values[flag.key] = value


def _convert(flag: Flag, word: str) -> Any:
    require_text(word, WHERE, flag.name)
    if flag.status != NOTICE and not word.strip():  # --save "$OUT" without OUT would be the working directory
        accepted = "a value, or leave the flag out"
        raise UserError("is empty (an unset variable?)", field=flag.name, value=word, accepted=accepted, where=WHERE)
    if flag.type is str and (len(word) > MAX_WORD or "\0" in word):
        problem = f"has {len(word):,} characters" if len(word) > MAX_WORD else "has a NUL character"
        accepted = f"a word of at most {MAX_WORD:,} characters"
        raise UserError(problem, field=flag.name, value=ascii(word[:40]), accepted=accepted, where=WHERE)
    value = _value(flag, word)
    if isinstance(value, int | float):
        _check_bounds(flag, value, word)
    if flag.choices and value not in flag.choices:
        if flag.remedy:
            raise _refusal(flag, [word])
        accepted = ", ".join(map(str, flag.choices))
        raise UserError("unknown value", field=flag.name, value=word, accepted=accepted, where=WHERE)
    return value


def _value(flag: Flag, word: str) -> Any:
    try:
        value = read_number(flag.type, word) if flag.type in (int, float) else flag.type(word)  # type: ignore[arg-type]
    except ValueError as error:
        accepted = _TYPES.get(flag.type, "JSON: a list of lists")  # type: ignore[call-overload]
        problem = str(error) if flag.type is float else f"is not {accepted}"
        accepted = "a finite number" if "finite" in problem else accepted
        raise UserError(problem, field=flag.name, value=word, accepted=accepted, where=WHERE) from None
    if isinstance(value, int) and abs(value) >= 2**63:
        shown = word if len(word) <= 40 else f"{word[:40]}..."
        raise UserError("is out of range", field=flag.name, value=shown, accepted="an integer of 64 bits", where=WHERE)
    return value


def _check_bounds(flag: Flag, value: float, word: str) -> None:
    if (violation := beyond(value, flag.least, flag.most, flag.above, flag.below)) is not None:
        raise UserError(violation[0], field=flag.name, value=word, accepted=violation[1], where=WHERE)


FILES, KEYED = "data files", "a *.jsonl, *.parquet or *.arrow corpus"


def check_use(args: Arguments, data: DataConfig | None) -> None:
    """Refuse flags that have no effect; harmless ones get a notice.

    Args:
        data: None: a dry run without data; any kind of data is assumed.

    Raises:
        UserError: lists all such flags.
    """
    args.facts |= _facts(args) | ({FILES, KEYED} if data is None else _data_facts(data))
    errors: list[UserError] = []
    for flag in ALL:
        if flag.key not in args.given or flag.key in args.failed or args[flag.key] is False:
            continue
        for need in flag.needs:
            if any(_holds(condition, args) for condition in need.any_of):
                continue
            without = " or ".join(need.any_of)
            if need.harmless:
                args.idle.append((flag.name, f"without {without} there is nothing for it to change"))
            else:
                errors.append(_error(flag, args, without, need))
            break
    if errors:
        raise together(errors)


def _error(flag: Flag, args: Arguments, without: str, need: Need) -> UserError:
    value = args[flag.key]
    shown = "given" if value is True else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    accepted = f"{without} beside it, or leave the flag out"
    return UserError(f"has no effect without {without}", field=flag.name, value=shown, accepted=accepted, where=WHERE)


def _holds(condition: str, args: Arguments) -> bool:
    name, _, expected = condition.partition(" ")
    if not name.startswith("--"):
        return condition in args.facts
    key = name[2:].replace("-", "_")
    if key in args.failed:
        return True
    value = args[key]
    return str(value) == expected if expected else bool(value)


def _facts(args: Arguments) -> set[str]:
    """Facts that follow from several flags, or from values other than off and 0."""
    meshes = args["hetero_process_meshes"] or ()
    holds = {
        "a learning rate that decays": args["lr_decay_style"] != "constant",
        "a dynamic loss scale": args["loss_scale"] is None,
        "context parallelism": args["context_parallel_size"] > 1 or any(size > 1 for size in meshes[1::5]),
        "pipeline parallelism": args["pipeline_model_parallel_size"] > 1 or bool(meshes),
    }
    return {fact for fact, is_true in holds.items() if is_true}


def _data_facts(data: DataConfig) -> set[str]:
    from hetero_megatron.data.corpus import may_have_keys

    if data.mock_data:
        return set()
    words = [word for group in (data.data_path, *map(data.paths_of, SPLITS)) for word in group or ()]
    return {FILES} | ({KEYED} if any(map(may_have_keys, words)) else set())


class Collector:
    """All errors of a command line in one message: each part of it is checked, whatever the others are.

    Args:
        errors: that were found before.
        places: flag -> file and line, of those that a file gave.
    """

    def __init__(self, errors: list[UserError], places: Mapping[str, str]) -> None:
        self._errors, self._places = errors, places

    def part(self, build: Callable[..., T], *arguments: Any) -> T:
        """What ``build`` returns. Where it raises a UserError, which is kept, or needs what could not be built or read,
        the result is one that no other part takes."""
        if not any(argument is _NOTHING for argument in arguments):
            try:
                return build(*arguments)
            except UserError as raised:
                error = placed(raised, self._places)
                if str(error) not in map(str, self._errors):
                    self._errors.append(error)
            except Unknown:
                pass
        return _NOTHING

    def done(self) -> None:
        """UserError: all that were found, in one."""
        if self._errors:
            raise together(self._errors)


_NOTHING: Any = object()
