"""Overrides of a NeMo launch line (Hydra's: ``model.num_layers=24``, ``++key=[1,2]``, ``~key``) as Megatron's flags.

Every word is accounted for: it becomes a flag, or is judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_megatron.cli.flags.parse import index
from hetero_megatron.cli.nemo_keys import BESIDE, CHOICES, FAMILIES, KEYS, NAMES, RANKS, SECTIONS, SWITCHES
from hetero_megatron.cli.shell_script import HONOURED, NOTICED, OPEN, REFUSED, Judged, mark, shown, unresolved
from hetero_megatron.utils.foreign_keys import as_json, says_nothing

OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_]\w*(\.\w+)+)=(?P<value>.*)", re.DOTALL)
_GROUP = re.compile(r"(?P<key>\+{0,2}[A-Za-z_][\w/@.-]*)=(?P<value>.*)", re.DOTALL)  # model/optim=adam, name=x
_REMOVED = re.compile(r"~(?P<key>[A-Za-z_][\w/@.]*)(=.*)?", re.DOTALL)
_INTERPOLATED = re.compile(r"\$\{(?P<key>[\w.]+)\}")
_RESOLVED_LATER = re.compile(r"\$\{[^}]*\}")
_WITH_VALUE = ("config-path", "config-name", "config-dir", "cfg", "experimental-rerun", "package")
_SHORT = {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir", "-c": "--cfg", "-p": "--package"}
ITS_YAML = "NeMo's YAML is not read: what the line does not say counts as Megatron's default"
_OF_NEMO_2 = ("yes", "y", "dryrun", "no-confirm", "direct", "repl")  # flags of its command line
_SPLITS = {"train": "train", "validation": "valid", "test": "test"}  # NeMo's name -> the flag's
_LIBRARIES = {  # of tokenizers -> the flag's type
    "huggingface": "HuggingFaceTokenizer", "sentencepiece": "SentencePieceTokenizer", "tiktoken": "TikTokenizer",
}  # fmt: skip


@dataclass
class NemoLaunch:
    """``flags`` that the line stands for, ``ranks`` that it asks for (None: it does not say), and what is said of
    words that are no flag of this program; ``said``: flag -> its values, and the key that says them."""

    flags: list[str] = field(default_factory=list)
    ranks: int | None = None
    others: list[Judged] = field(default_factory=list)
    said: dict[str, tuple[list[str], str]] = field(default_factory=dict)


def read_overrides(words: Sequence[str]) -> NemoLaunch:
    """Of the words after the program's name."""
    launch = NemoLaunch()
    values = _values(words, launch)
    for key, value in values.items():
        values[key] = [_interpolated(item, values) for item in value] if isinstance(value, list) else (
            _interpolated(value, values)
        )  # fmt: skip
    for scheduler in ("model.optim.sched", "optim.lr_scheduler"):
        _hold(scheduler, values, launch)
    for key, value in values.items():
        if key not in RANKS:
            _read(key, value, values, launch)
    launch.ranks = _ranks(values, launch)
    return launch


def _hold(scheduler: str, values: dict[str, Any], launch: NemoLaunch) -> None:
    """Steps at the least learning rate after warmup and decay, which is a shorter decay; without warmup NeMo's cosine
    has them elsewhere, and a ratio of warmup would be of fewer steps here."""
    hold, decay = f"{scheduler}.constant_steps", f"{scheduler}.max_steps"
    steps, total = str(values.get(hold)), str(values.get(decay) or values.get("trainer.max_steps"))
    warm = _text(values.get(f"{scheduler}.warmup_steps")) not in ("null", "0.0")
    if warm and steps.isdecimal() and total.isdecimal() and 0 < int(steps) < int(total):
        del values[hold]
        values[decay] = str(int(total) - int(steps))
        launch.others.append(Judged(hold, [steps], HONOURED))


def _interpolated(value: Any, values: Mapping[str, Any]) -> Any:
    """The value of the key that a text names as a whole; what else Hydra puts in is not known."""
    if not isinstance(value, str):
        return value
    whole = _INTERPOLATED.fullmatch(value)
    other = values.get(whole["key"]) if whole is not None else None
    if other is not None and not (isinstance(other, str) and _RESOLVED_LATER.search(other)):
        return other
    return _RESOLVED_LATER.sub(lambda match: mark(match[0]), value)


def _values(words: Sequence[str], launch: NemoLaunch) -> dict[str, Any]:
    """Key -> value, the last one of several, of objects by their leaves."""
    values: dict[str, Any] = {}
    words_left = iter(words)
    for word in words_left:
        if match := OVERRIDE.fullmatch(word):
            for key, value in _leaves(match["key"], hydra_value(match["value"])):
                values[key] = value
        elif match := _REMOVED.fullmatch(word):
            family = _family(match["key"])
            launch.others.append(_noticed(word, [], family) if family is not None else Judged(
                word, [], REFUSED, "what is left of NeMo's YAML without it is not known", "the value that shall count"
            ))  # fmt: skip
        elif word.startswith("-"):
            _hydra_flag(word, words_left, launch)
        elif (match := _GROUP.fullmatch(word)) and match["key"].lstrip("+") in KEYS.accepted_keys:
            values[match["key"].lstrip("+")] = hydra_value(match["value"])
        elif not unresolved(word) or match is not None:
            launch.others.append(Judged(shown(word), [], REFUSED, "names a part of NeMo's YAML, which is not read"
                                        if match is not None else "is no override", "KEY=VALUE"))  # fmt: skip
        else:  # may be any words
            launch.flags.append(word)
    return values


def _hydra_flag(word: str, words_left: Iterator[str], launch: NemoLaunch) -> None:
    name, separator, value = word.partition("=")
    option = _SHORT.get(name, name).lstrip("-").replace("_", "-")
    if option in _WITH_VALUE and not separator:
        value = next(words_left, "")
    if option == "factory":
        value = value or next(words_left, "")
        launch.others.append(Judged(name, [shown(value)], REFUSED, "a recipe of NeMo 2, which is not read",
                                    "what it says, as KEY=VALUE"))  # fmt: skip
        return
    is_hydra_flag = option in (*_WITH_VALUE, "multirun", "help", "hydra-help", "version", "run", "info", "resolve")
    values = [shown(value)] if value else []
    if option in _OF_NEMO_2:
        launch.others.append(Judged(name, values, NOTICED, "of NeMo's command line"))
    elif is_hydra_flag:
        launch.others.append(Judged(name, values, NOTICED, "names or shows NeMo's YAML, which is not read"))
    else:
        launch.others.append(Judged(name, values, REFUSED, "no flag of Hydra", "KEY=VALUE"))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and key != "model.data.data_prefix":
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _read(key: str, value: Any, values: Mapping[str, Any], launch: NemoLaunch) -> None:
    """A key's flags; or what is said of it."""
    flag = index().get("--" + NAMES.get(key, key.rpartition(".")[2]).replace("_", "-"))
    section, switch = key.rpartition(".")[0], BESIDE.get(key)
    if key not in KEYS.fixed and (family := _family(key)) is not None:
        launch.others.append(_noticed(key, value, family))
    elif isinstance(value, str) and (unknown := unresolved(value)) and key in (*KEYS.fixed, *CHOICES, *SWITCHES):
        reason = f"{', '.join(unknown)}: known only when the script runs"
        launch.others.append(Judged(key, _words(value), OPEN, reason))
    elif switch is not None and values.get(switch) is not True:
        launch.others.append(_noticed(key, value, f"says something only beside {switch}=True"))
    elif key in KEYS.fixed:
        if any(_text(value) == _text(one) for one in KEYS.fixed[key]):
            launch.others.append(Judged(key, _words(value), HONOURED))
        else:
            accepted = ", ".join(dict.fromkeys(as_json(one) for one in KEYS.fixed[key]))
            launch.others.append(Judged(key, _words(value), REFUSED, KEYS.problem, accepted))
    elif key in KEYS.harmless:
        launch.others.append(_noticed(key, value, KEYS.harmless[key]))
    elif key in KEYS.accepted_keys:
        words = _chosen(key, value, launch) if key in CHOICES else _joint(key, value, values)
        _add(key, value, words, launch)
    elif section not in SECTIONS and not says_nothing(value):
        reason = f"nothing is read under {section}" if flag is not None else f"not known here{KEYS.nearest(key)}"
        launch.others.append(Judged(key, _words(value), REFUSED, reason, f"keys of {', '.join(SECTIONS)}"))
    elif flag is None and section in SECTIONS and isinstance(value, bool) and (negated := _negated(key)) is not None:
        _add(key, value, [] if value else [negated], launch)
    elif flag is None and says_nothing(value):
        launch.others.append(_noticed(key, value, f"not known, and off{KEYS.nearest(key)}"))
    elif flag is None:
        accepted = "a key of NeMo's GPT, or Megatron's name for it; without it, if it changes nothing"
        launch.others.append(Judged(key, _words(value), REFUSED, f"not known here{KEYS.nearest(key)}", accepted))
    else:
        _add(key, value, flag_words(flag.name, value), launch)


def _add(key: str, value: Any, words: Sequence[str] | None, launch: NemoLaunch) -> None:
    """Flags that are judged as any other; a key that needs none says what is so anyway. None: it was judged."""
    if words:
        for flag, values in _groups(words):
            said, by = launch.said.setdefault(flag, (values, key))
            if said != values:
                reason = f"{by} says {' '.join(said)}, and is the same here"
                launch.others.append(Judged(key, _words(value), REFUSED, reason, "one of them, or both alike"))
                return
        launch.flags += words
    elif words is not None:
        launch.others.append(Judged(key, _words(value), HONOURED))


def _groups(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values."""
    begins = [i for i, word in enumerate(words) if word.startswith("--")]
    for begin, end in zip(begins, [*begins[1:], len(words)]):
        yield words[begin], list(words[begin + 1 : end])


def _chosen(key: str, value: Any, launch: NemoLaunch) -> list[str] | None:
    choices = CHOICES[key]
    texts = {_text(choice): words for choice, words in choices.items()}
    if value is None:
        return []
    if _text(value) not in texts:
        accepted = ", ".join(as_json(choice) for choice in choices)
        launch.others.append(Judged(key, _words(value), REFUSED, "is not supported", accepted))
        return None
    return list(texts[_text(value)])


def _joint(key: str, value: Any, values: Mapping[str, Any]) -> list[str]:
    """Flags of a key that counts beside others."""
    if key == "model.num_query_groups":
        return [] if value is None else ["--group-query-attention", "--num-query-groups", str(value)]
    if key == "model.optim.betas":
        betas = value if isinstance(value, list) else [value]
        names = ("--adam-beta1", "--adam-beta2", "--betas")
        return [] if value is None else [part for pair in zip(names, map(str, betas)) for part in pair]
    if key == "model.fp8":
        e4m3 = values.get("model.fp8_e4m3") is True
        return ["--fp8-format", "e4m3" if e4m3 else "hybrid"] if value is True else []
    if key in ("model.bias_activation_fusion", "model.bias_gelu_fusion"):
        gelu = values.get("model.activation", "gelu") in (None, "gelu")
        return [] if value is not False else ["--no-bias-gelu-fusion" if gelu else "--no-bias-swiglu-fusion"]
    hugging_face = values.get("model.tokenizer.library") == "huggingface"
    if key == "model.tokenizer.library":
        none = value in (None, "megatron")  # which says it under model.tokenizer.type
        return [] if none else ["--tokenizer-type", _LIBRARIES.get(str(value), str(value))]
    if key == "model.tokenizer.type" and hugging_face:
        return flag_words("--tokenizer-model", value)
    if key == "model.data.data_prefix" and isinstance(value, dict):
        return [word for name, paths in value.items()
                for word in flag_words(f"--{_SPLITS.get(str(name), str(name))}-data-path", paths)]  # fmt: skip
    return flag_words("--" + NAMES[key].replace("_", "-"), value) if key in NAMES else []


def flag_words(name: str, value: Any) -> list[str]:
    """A flag as words; a switch that is off, and nothing, are none."""
    flag = index().get(name)
    if value is None or value is False:
        return []
    if value is True:
        return [name] if flag is None or flag.nargs == 0 else [name, "True"]
    if flag is not None and flag.nargs == 0:  # a value for a switch is refused by name
        return [f"{name}={value}"]
    return [name, *map(str, value)] if isinstance(value, list) else [name, str(value)]


def _negated(key: str) -> str | None:
    """The flag that turns off what a key turns on."""
    last = key.rpartition(".")[2].replace("_", "-")
    return next((name for name in (f"--no-{last}", f"--disable-{last}") if name in index()), None)


def _family(key: str) -> str | None:
    return next((reason for name, reason in FAMILIES.items() if key == name or key.startswith(f"{name}.")), None)


def _noticed(key: str, value: Any, reason: str) -> Judged:
    return Judged(key, _words(value) if value != [] else [], NOTICED, reason)


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return ["{" + ", ".join(f"{name}: {' '.join(_words(inner))}" for name, inner in value.items()) + "}"]
    return [shown(as_json(one)) for one in value] if isinstance(value, list) else [shown(as_json(value))]


def _text(value: Any) -> str:
    """By which values are compared: numbers as such, words without regard to case."""
    text = as_json(value).strip().lower()
    try:
        return text if isinstance(value, bool) else str(float(text))
    except ValueError:
        return text


def _ranks(values: Mapping[str, Any], launch: NemoLaunch) -> int | None:
    """Devices of each node times nodes; None: the line does not say."""
    if not any(key in values for key in RANKS):
        return None
    ranks: int | None = 1
    for key in RANKS:
        value = values.get(key, "1")
        if key == "trainer.devices" and isinstance(value, str) and "," in value:  # Lightning: "0,1"
            value = [part for part in value.split(",") if part.strip()]
        count = len(value) if isinstance(value, list) else int(value) if str(value).isdecimal() else 0
        if key in values and count:
            launch.others.append(Judged(key, _words(values[key]), HONOURED))
        elif key in values:
            launch.others.append(Judged(key, _words(values[key]), NOTICED, "how many is not said; see --ranks"))
        ranks = ranks * count if ranks and count else None
    return ranks


def hydra_value(text: str) -> Any:
    """A value as Hydra reads it: null, true and false, lists and objects; everything else is text.

    A list that is quoted as a whole is meant as a list.
    """
    stripped = text.strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        inner = stripped[1:-1]
        return hydra_value(inner) if inner[:1] in ("[", "{") else inner
    if stripped[:1] in ("[", "{"):
        try:
            value, end = _item(stripped, 0, 0)
        except (ValueError, IndexError):
            return stripped
        return value if end == len(stripped) else stripped
    return _scalar(stripped)


def _scalar(text: str) -> Any:
    return {"true": True, "false": False, "null": None, "none": None}.get(text.lower(), text)


def _item(text: str, at: int, depth: int, ends: str = ",]}") -> tuple[Any, int]:
    """(value, where it ends) of what begins at ``at``. ValueError, IndexError: it does not end."""
    at += len(text) - at - len(text[at:].lstrip())
    letter = text[at]
    if depth > 16:
        raise ValueError("too deep")
    if letter in "'\"":
        end = text.index(letter, at + 1)
        return text[at + 1 : end], end + 1
    if letter == "[":
        return _list(text, at + 1, depth + 1)
    if letter == "{":
        return _object(text, at + 1, depth + 1)
    end = at
    while text[end] not in ends:
        if text.startswith("${", end):
            end = text.index("}", end)
        elif text[end] == "\ue000":  # what the script does not say
            end = text.index("\ue001", end)
        end += 1
    return _scalar(text[at:end].strip()), end


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while True:
        if text[at:].lstrip()[0] == "]":
            return items, text.index("]", at) + 1
        item, at = _item(text, at, depth)
        items.append(item)
        at = _separator(text, at, "]")


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    while True:
        if text[at:].lstrip()[0] == "}":
            return items, text.index("}", at) + 1
        key, at = _item(text, at, depth, ":")
        at = text.index(":", at) + 1
        items[str(key)], at = _item(text, at, depth)
        at = _separator(text, at, "}")


def _separator(text: str, at: int, closing: str) -> int:
    """Where the next item begins, or the bracket closes."""
    at += len(text) - at - len(text[at:].lstrip())
    if text[at] not in ("," + closing):
        raise ValueError("no separator")
    return at + (text[at] == ",")
