"""Quantities with units: ``80 GiB``, ``25 GB/s``, ``5 us``, ``312 TFLOP/s``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import format_bytes, format_rate
from hetero_megatron.utils.yaml_document import Entry

if TYPE_CHECKING:
    from hetero_megatron.utils.yaml_document import Entry

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {prefix + "B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {prefix + unit: factor / 8 for prefix, factor in _DECIMAL.items() for unit in ("bit", "b")}

__all__ = ["EXAMPLES", "UNITS", "format_bytes", "format_rate", "quantity"]

UNITS: dict[str, dict[str, float]] = {
    "bytes": {**_BYTES},
    "bytes/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{unit}/s": factor for unit, factor in _BITS.items()}
    | {f"{prefix}bps": factor / 8 for prefix, factor in _DECIMAL.items()},
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "flop/s": {f"{p}{unit}": f for p, f in _DECIMAL.items() for unit in ("FLOP/s", "FLOPS", "FLOPs")},
}
# Base units, both ends included: far beyond any hardware, and far from where arithmetic in fp64 overflows.
RANGES = {"bytes": (1.0, 1e18), "bytes/s": (1.0, 1e18), "seconds": (0.0, 1e6), "flop/s": (1.0, 1e24)}
EXAMPLES = {
    "bytes": "80 GiB or 512 MB",
    "bytes/s": "25 GB/s, 50 MB/s or 100 Gbit/s",
    "seconds": "5 us or 0.1 ms",
    "flop/s": "312 TFLOP/s",
}


def quantity(entry: Entry, kind: str) -> float:
    """The value in base units of ``kind`` (bytes, bytes/s, seconds, flop/s).

    Raises:
        UserError: no unit, an unknown one, not a number, or not in ``RANGES``.
    """
    accepted = EXAMPLES[kind]
    value = entry.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        entry.fail("a unit is missing", accepted)
    if not isinstance(value, str) or len(value) > 60:
        entry.fail("a quantity with its unit was expected", accepted)
    match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?\d+)?)\s*([^\d\s].*?)?\s*", value)
    if not match:
        entry.fail("a quantity with its unit was expected", accepted)
    try:
        number = float(match[1])
    except ValueError:
        entry.fail(f"{match[1]!r} is not a number", accepted)
    unit = match[2]
    if unit is None:
        entry.fail("a unit is missing", accepted)
    factor = UNITS[kind].get(unit)
    if factor is None:
        entry.fail(f"{unit!r} is not a unit of {kind}", accepted)
    base_value = number * factor
    lowest, highest = RANGES[kind]
    if not lowest <= base_value <= highest:
        entry.fail("out of range", f"a positive quantity such as {accepted}")
    return base_value


@dataclass(frozen=True)
class WordKind:
    """A kind of word.

    Args:
        what: ``is not …``.
        pattern: of the whole word.
        accepted: in a message.
        longest: characters.
    """

    what: str
    pattern: str
    accepted: str
    longest: int = 200

    def fits(self, text: str) -> bool:
        return len(text) <= self.longest and re.fullmatch(self.pattern, text) is not None

    def read(self, entry: Entry) -> str:
        """The word of a cluster file; UserError."""
        text = entry.text()
        if not self.fits(text):
            entry.fail(f"is not {self.what}", accepted=self.accepted)
        return text

    def check(self, text: str, field: str, where: str = "") -> str:
        """A word from somewhere else, as a flag; UserError."""
        if not self.fits(text):
            raise UserError(f"is not {self.what}", field=field, value=text, accepted=self.accepted, where=where)
        return text


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
HOST = WordKind("a name or address of a host", r"[A-Za-z0-9_]([A-Za-z0-9_.:%-]*[A-Za-z0-9_])?",
                "e.g. node-0, or 10.0.0.1", 253)  # fmt: skip
# The name of a host, of a log file and of a link's end.
NODE = WordKind("a name for nodes", r"[A-Za-z0-9_]([A-Za-z0-9_.:%+-]*[A-Za-z0-9_+])?",
                "letters, digits and . _ - + inside, e.g. node-a")  # fmt: skip
CHIP = WordKind("a name for a chip", r"\w[\w .+()@:-]*", "letters, digits, blanks and . _ - + ( ) @ : inside")
VENDOR = WordKind("a vendor's name", r"\w[\w .&+-]*", "letters, digits and blanks")
USER = WordKind("the name of a user", r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*", "letters, digits and . _ - @ + inside", 100)
INTERFACES = WordKind(
    "the name of a network interface", r"\w[\w.:@-]{0,14}(,\w[\w.:@-]{0,14})*", "e.g. eth0, or eth0,eth1"
)
PATH = WordKind("a path", r"[\w/.+@][\w/.+@%=:, -]*",
                "letters, digits, blanks and / . _ - + @ % = : , (~ and variables are not replaced)", 1000)  # fmt: skip
ABSOLUTE = WordKind("an absolute path", r"/[\w/.+@%=, -]*", "e.g. /data", 1000)
SLURM = WordKind("one word of SLURM", r"[A-Za-z0-9_][A-Za-z0-9_.,:/=+@-]*", "letters, digits and . , : / = + @ _ -")
SLURM_TIME = WordKind(
    "a time limit of SLURM", r"\d+(-\d+)?(:\d+){0,2}|UNLIMITED|INFINITE", "minutes, HH:MM:SS, D-HH or D-HH:MM:SS"
)
IMAGE = WordKind("the name of an image", r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", "REGISTRY/NAME:TAG", 500)
NAMESPACE = WordKind("a name in Kubernetes", r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "small letters, digits and -")
CLAIM = WordKind("a name in Kubernetes", _DOMAIN, "small letters, digits, - and .")
LABEL_NAME = WordKind("the name of a label", rf"({_DOMAIN}/)?{_LABEL}", "e.g. pool, or example.com/pool", 317)
LABEL_VALUE = WordKind("the value of a label", rf"({_LABEL})?", "at most 63 letters, digits and . _ -")
RESOURCE = WordKind("a resource of Kubernetes", rf"({_DOMAIN}/)?{_LABEL}", "e.g. nvidia.com/gpu", 317)
NFS = WordKind("an export", r"[A-Za-z0-9_][A-Za-z0-9_.-]*:/[\w/.+@%=, -]*", "SERVER:/PATH", 1000)
VARIABLE = WordKind("the name of a variable", r"[A-Za-z_][A-Za-z0-9_]*", "letters, digits and _")


def check_printable(entry: Entry) -> None:
    """Refuse line breaks and other control characters anywhere in a document, in keys and in values."""
    if isinstance(entry.value, dict):
        for key, item in entry.value.items():
            if not key.isprintable():
                item.fail(f"the key {key!r} has control characters", accepted="printable characters")
            check_printable(item)
    elif isinstance(entry.value, list):
        for item in entry.value:
            check_printable(item)
    elif isinstance(entry.value, str) and not entry.value.isprintable():
        entry.fail("line breaks and control characters are none of a cluster file", accepted="printable characters")
