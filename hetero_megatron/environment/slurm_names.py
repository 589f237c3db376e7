"""SLURM's lists of host names, and what a step's environment says of where its tasks meet."""

from __future__ import annotations

import re
from collections.abc import Mapping

MOST_NAMES = 1 << 17
_PART = re.compile(r"(?P<stem>[^\[\],]*)(\[(?P<ranges>[0-9,\-]+)\])?")
PORTS = range(20000, 40000)  # where a step's first task listens, by numbers of job and step


def expand(text: str) -> list[str]:
    """``n[01-03,7],login`` as n01, n02, n03, n7, login; ``[]`` where it is no such list."""
    expanded: list[str] = []
    for word in _split(text.strip()):
        names = [""]
        position = 0
        while position < len(word):
            match = _PART.match(word, position)
            if match is None or match.end() == position:
                return []
            position = match.end()
            numbers = [""] if match["ranges"] is None else _numbers(match["ranges"])
            names = [name + match["stem"] + number for name in names for number in numbers]
            if not names or len(names) > MOST_NAMES:
                return []
        expanded += names
    return expanded


def _split(text: str) -> list[str]:
    """At the commas that are in no brackets."""
    words, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            words.append("")
        else:
            words[-1] += letter
    return words if not depth and all(words) else []


def _numbers(text: str) -> list[str]:
    """``01-03,7``: 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or len(high) > 9 or len(low) > 9:
            return []
        last = int(high) if dash else int(low)
        if not int(low) <= last < int(low) + MOST_NAMES:
            return []
        numbers += [str(number).zfill(len(low)) for number in range(int(low), last + 1)]
    return numbers


def rendezvous_address(environment: Mapping[str, str]) -> tuple[str, int]:
    """(host of the step's first task, a port that all its tasks find alike); ("", 0): the step does not say."""
    hosts = expand(environment.get("SLURM_STEP_NODELIST", ""))
    job = environment.get("SLURM_JOB_ID", environment.get("SLURM_JOBID", ""))
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "0"))
    if not hosts or not (job.isdigit() and step.isdigit()):
        return "", 0
    return hosts[0], PORTS[(int(job) * 7 + int(step)) % len(PORTS)]
