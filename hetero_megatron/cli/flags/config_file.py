"""``--config FILE``: flags of a run from a YAML, JSON or TOML file, by their names; the command line wins.

A key is a flag's name with or without its dashes (``train-iters``, ``train_iters``), true is a switch that is on, a
list the values of a flag that takes several. Nothing in it is expanded. What is read becomes words of a command line,
so that a file can say nothing that the command line cannot.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hetero_megatron.cli.flags.flag import SUPPORTED, Flag, unknown_flag
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_text
from hetero_megatron.utils.yaml_document import Entry, QuotingDumper, from_data, read_document

CONFIG = "--config"
_KINDS = {int: "an integer", float: "a number"}


class FileWords:
    """What the file ``name`` of a command line's ``--config`` brings.

    Attributes:
        words: those of the file, of flags that the command line does not give, then the command line's own.
        errors: what the file says and cannot be taken; failed: keys of the flags that it says it of.
        places: flag -> file and line, of what came from the file.
    """

    def __init__(self, name: str, argv: Sequence[str], flags: Mapping[str, Flag]) -> None:
        self.words, self.errors, self.places = list(argv), list[UserError](), dict[str, str]()
        self.failed = set[str]()
        on_command_line = {flags[word.partition("=")[0]].name for word in argv if word.partition("=")[0] in flags}
        file_words: list[str] = []
        try:
            entries = _document(name).any_mapping()
        except UserError as error:
            self.errors.append(error)
            return
        spelled: dict[str, str] = {}
        for key, entry in entries.items():
            flag = None
            try:
                flag = _flag(key, entry, flags)
                if flag.name in spelled:
                    problem = f"is {flag.name}, as {spelled[flag.name]} is: the file gives it twice"
                    raise UserError(problem, field=key, accepted="one of the two", where=entry.where)
                spelled[flag.name] = key
                words = _words(flag, key, entry)
            except UserError as error:
                self.errors.append(error)
                self.failed |= {flag.key} if flag is not None and flag.name not in on_command_line else set()
                continue
            if flag.name not in on_command_line:
                self.places[flag.name] = entry.where or name
                file_words += words
        self.words = [*file_words, *self.words]


def placed(error: UserError, places: Mapping[str, str]) -> UserError:
    """The error with the file and line that its flag came from, if that is where it came from."""
    if error.field not in places or error.where in places.values():
        return error
    value = {} if error.value is None else {"value": error.value}
    return UserError(error.problem, field=error.field, accepted=error.accepted, where=places[error.field], **value)


def effective(values: Mapping[str, Any], given: set[str], places: Mapping[str, str], flags: Sequence[Flag]) -> str:
    """The configuration that counts, as such a file, with where each value came from; defaults as comments."""
    lines, defaults = [], []
    for flag in flags:
        value = values.get(flag.key)
        if flag.status != SUPPORTED or flag.name in (CONFIG, "--write-config") or value is None or value is False:
            continue
        simple_value = list(value) if isinstance(value, tuple) else value
        one = {flag.name[2:]: simple_value}
        text = yaml.dump(one, Dumper=QuotingDumper, default_flow_style=True, width=1 << 20).strip()[1:-1]
        if flag.key in given:
            lines.append(f"{text}  # {places.get(flag.name, 'command line')}")
        else:
            defaults.append(f"# {text}")
    return "\n".join([*lines, "# by default, or by the plan:", *defaults])


def _document(name: str) -> Entry:
    if not name.endswith(".toml"):
        return read_document(name)
    try:
        return from_data(tomllib.loads(read_text(name)), "", name)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"is not TOML: {error}", field=CONFIG, value=name, accepted="keys and values") from None


def _flag(key: str, entry: Entry, flags: Mapping[str, Flag]) -> Flag:
    name = "--" + key.removeprefix("--").replace("_", "-")
    if name not in flags:
        error = unknown_flag(name, flags, entry.where)
        raise UserError(error.problem, field=key, accepted=error.accepted, where=entry.where)
    if name == CONFIG:
        raise UserError("a file names no other one", field=key, accepted="all keys in one file", where=entry.where)
    return flags[name]


def _words(flag: Flag, key: str, entry: Entry) -> list[str]:
    """What the command line would say."""
    value = entry.plain()
    if flag.nargs == 0:
        if not isinstance(value, bool):
            raise UserError("is a switch", field=key, value=value, accepted="true or false", where=entry.where)
        return [flag.name] if value else []
    several = flag.nargs != 1
    values = value if isinstance(value, list) and several else [value]
    for element in values:
        if isinstance(element, bool) or not isinstance(element, (str, int, float)):
            value_kind = _KINDS.get(flag.type, "a word")  # type: ignore[call-overload]
            accepted = f"{value_kind}, or a list of such" if several else value_kind
            raise UserError("is no value of this flag", field=key, value=value, accepted=accepted, where=entry.where)
        if several and str(element).startswith("-") and not str(element)[1:2].isdigit():
            accepted = "values that do not begin with a dash"
            raise UserError("looks like a flag", field=key, value=element, accepted=accepted, where=entry.where)
    words = [str(element) for element in values]
    return [flag.name, *words] if several else [f"{flag.name}={words[0]}"]
