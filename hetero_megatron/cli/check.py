"""``hetero-megatron check SCRIPT``: what this version would do with a launch line of Megatron-LM, FlagScale or NeMo.

Nothing of the script is run: it is read as far as it says what it does (``shell_script``). YAML of FlagScale and
overrides of NeMo (``model.num_layers=24``) become the flags that they stand for (``foreign_launch``).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from hetero_megatron.cli.arguments import ArgumentParser, count
from hetero_megatron.cli.configure import configure_arguments
from hetero_megatron.cli.flags.flag import NOTICE
from hetero_megatron.cli.flags.parse import Arguments, index, parse_all
from hetero_megatron.cli.foreign_launch import Launch, launches_of
from hetero_megatron.cli.output import print_json
from hetero_megatron.cli.shell_script import HONOURED, NOTICED, OPEN, REFUSED, Judged, shown, unresolved
from hetero_megatron.errors import UserError, printable
from hetero_megatron.utils.files import read_text
from hetero_megatron.utils.text import plural

_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@dataclass
class Verdict:
    """Of one launch line. ``refused``: what is said of no flag in it, as one that is missing."""

    line: int
    program: str
    ranks: int
    flags: list[Judged] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.refused and all(flag.status != REFUSED for flag in self.flags)


def parser() -> argparse.ArgumentParser:
    p = ArgumentParser("check", "Say of every flag of a launch script whether it is honoured, noticed or refused; "
                       "nothing is run. Exit code 2 if anything is refused.")  # fmt: skip
    p.add_argument("script", metavar="SCRIPT", help="shell script, or FlagScale's YAML; - for standard input")
    p.add_argument("--ranks", type=count(1, 1 << 16), help="how many there are, where the script does not say so")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable that the script is "
                   "given from outside; 1=VALUE for its first argument")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(list(argv))
    variables = dict(_pair(word) for word in options.set)
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded to judge a script
    text = read_text("/dev/stdin" if options.script == "-" else options.script, "SCRIPT")
    launches = launches_of(text, options.script, variables)
    if not launches:
        raise UserError("no launch line is in it", field="SCRIPT", value=options.script,
                        accepted="a script that starts pretrain_gpt.py or another trainer by python, torchrun or srun, "
                        "or FlagScale's YAML with model: and system:")  # fmt: skip
    verdicts = [check_launch(launch, options.ranks) for launch in launches]
    if options.json:
        print_json({"script": options.script, "launches": [{**asdict(v), "ok": v.ok} for v in verdicts]})
    else:
        for verdict in verdicts:
            print(printable(format_verdict(verdict, options.script)))
    return 0 if all(verdict.ok for verdict in verdicts) else 2


def _pair(word: str) -> tuple[str, str]:
    name, separator, value = word.partition("=")
    if not separator or not name:
        raise UserError("is no variable", field="--set", value=word, accepted="NAME=VALUE")
    return name, value


def check_launch(launch: Launch, ranks: int | None = None) -> Verdict:
    """What would be done with every flag of a launch line."""
    known_flags, groups = index(), _groups(launch.flags)
    shown_groups = [[shown(word) for word in group] for group in groups]
    clear = [word for group in groups if not any(map(unresolved, group)) for word in group]
    args, errors = parse_all(clear)
    for group in groups:
        flag = known_flags.get(group[0].partition("=")[0])
        if any(map(unresolved, group)) and flag is not None and flag.status != NOTICE:
            args.given.add(flag.key)
            args.failed.add(flag.key)
    world = ranks or launch.ranks or _least(args)
    may_be_any_flag = any(unresolved(group[0]) for group in groups)  # words that may be any flags
    notices: tuple[str, ...] = ()
    try:
        notices = configure_arguments(args, list(errors), {"WORLD_SIZE": str(world)}).notices
    except UserError as refusal:
        errors = list(refusal.several or (refusal,))
    said = [*([launch.notice] if launch.notice else []), *(n for n in notices if "no effect" not in n)]
    verdict = Verdict(launch.line, launch.program, world, notices=said)
    idle = dict(args.idle)
    for group, words in zip(groups, shown_groups, strict=True):
        verdict.flags.append(_judged(group, words, errors, idle))
    verdict.flags += launch.others
    flagged = {flag.flag for flag in verdict.flags}
    for problem in errors:
        missing = "missing" in problem.problem and may_be_any_flag
        if problem.field not in flagged and not missing:
            verdict.refused.append({"field": problem.field, "reason": problem.problem, "accepted": problem.accepted})
    return verdict


def _judged(group: list[str], words: list[str], errors: Sequence[UserError], idle: dict[str, str]) -> Judged:
    name = words[0].partition("=")[0]
    flag = index().get(name)
    values = [words[0].partition("=")[2], *words[1:]] if "=" in words[0] else words[1:]
    names = {name} if flag is None else {name, flag.name}
    if own_errors := [error for error in errors if error.field in names]:
        return Judged(name, values, REFUSED, "; ".join(e.problem for e in own_errors), own_errors[0].accepted)
    if flag is not None and flag.name in idle:
        return Judged(name, values, NOTICED, idle[flag.name])
    if flag is not None and flag.status == NOTICE:
        return Judged(name, values, NOTICED, flag.help)
    if unknown := [part for word in group for part in unresolved(word)]:
        return Judged(name, values, OPEN, f"{', '.join(unknown)}: known only when the script runs")
    if word_errors := [error for error in errors if error.field == "word" and error.value in words]:
        return Judged(name, values, REFUSED, word_errors[0].problem, word_errors[0].accepted)
    return Judged(name, values, HONOURED)


def _groups(words: Sequence[str]) -> list[list[str]]:
    """Each flag with its values; words that are not known stand alone."""
    groups: list[list[str]] = []
    for word in words:
        flag = word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit() and len(word) > 1)
        if flag or not groups or unresolved(word)[:1] == [shown(word)] and _wants_no_more(groups[-1]):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _wants_no_more(group: list[str]) -> bool:
    flag = index().get(group[0].partition("=")[0])
    if flag is None:
        return len(group) > 1 or "=" in group[0]
    return isinstance(flag.nargs, int) and len(group) - 1 + ("=" in group[0]) >= flag.nargs


def _least(args: Arguments) -> int:
    """As few ranks as the degrees of parallelism allow."""
    return math.prod(args.values[key] or 1 for key in _DEGREES if key not in args.failed)


def format_verdict(verdict: Verdict, script: str) -> str:
    """For the terminal."""
    lines = [f"{script}:{verdict.line}: {verdict.program}, {plural(verdict.ranks, 'rank')}"]
    honoured = [flag for flag in verdict.flags if flag.status == HONOURED]
    lines.append(f"  {HONOURED} ({len(honoured)}): " + ", ".join(" ".join([f.flag, *f.values]) for f in honoured))
    for status in (NOTICED, OPEN, REFUSED):
        rows = [flag for flag in verdict.flags if flag.status == status]
        refused_words = verdict.refused if status == REFUSED else []
        if rows or refused_words:
            lines.append(f"  {status} ({len(rows) + len(refused_words)}):")
        for row in rows:
            accepted = f". Accepted: {row.accepted}" if row.accepted else ""
            lines.append(f"    {' '.join([row.flag, *row.values])}: {row.reason}{accepted}")
        for problem in refused_words:
            lines.append(f"    {problem['field']}: {problem['reason']}. Accepted: {problem['accepted']}")
    lines += [f"  notice: {' '.join(notice.split())}" for notice in verdict.notices]
    return "\n".join(lines)
