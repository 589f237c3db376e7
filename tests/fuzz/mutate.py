"""Random changes to data, to text and to files; all are functions of a seeded generator."""

from __future__ import annotations

import copy
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**18,
    10**40,
    0.5,
    -0.0,
    1e-308,
    1e308,
    1e12,
    float("nan"),
    float("inf"),
    float("-inf"),
)
TEXTS = (
    "",
    " ",
    "0",
    "-1",
    "1e999",
    "nan",
    "true",
    "null",
    "x" * 5000,
    "\ud800",
    "a\0b",
    "../../etc/passwd",
    "/etc/passwd",
    "%s%n",
    "<script>alert(1)</script>",
    "\x1b[31m",
    "0-999999999",
    "5-2",
    "::",
    "é" * 40,
    "1:30",
)


def deep(levels: int, inner: Any = 0) -> Any:
    """A list in a list in a list."""
    for _ in range(levels):
        inner = [inner]
    return inner


def odd_value(rng: random.Random) -> Any:
    """Something that is hardly ever meant."""
    makers: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(TEXTS),
        lambda: None,
        lambda: rng.random() < 0.5,
        list,
        dict,
        lambda: [rng.choice(NUMBERS)] * rng.choice((1, 2, 3, 1000)),
        lambda: {rng.choice(TEXTS[3:9]): rng.choice(NUMBERS)},
        lambda: deep(rng.choice((3, 70, 500))),
    )
    return rng.choice(makers)()


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a nested structure."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        _places(value[key], found)
    return found


def tree(rng: random.Random, value: Any) -> Any:
    """A copy of lists and maps with one change."""
    value = copy.deepcopy(value)
    places = _places(value, [])
    if not places or rng.random() < 0.02:
        return odd_value(rng)
    holder, key = rng.choice(places)
    other, other_key = rng.choice(places)
    change = rng.randrange(8)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif change == 2 and isinstance(holder, dict):
        holder[rng.choice((*TEXTS, f"{key}s", str(key).upper()))] = holder.pop(key)
    elif change == 3:
        holder[key] = copy.deepcopy(other[other_key])
    elif change == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = rng.choice(
            (-holder[key], holder[key] + 1, holder[key] * 1000, float(holder[key]), str(holder[key]))
        )
    elif change == 5:
        holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    else:
        holder[key] = odd_value(rng)
    return value


INSERTS = (
    b"\x00",
    b"\xff\xfe",
    b"\t",
    b"[" * 2000,
    b"{" * 100_000,
    b"\n- &a [*a]\n",
    b"!!python/object/apply:os.getpid []",
    b"!!bool xyz",
    b"&x ",
    b"*x ",
    b"? ",
    b"<<: ",
    b"---\n",
    b"9" * 5000,
    b"\\ud800",
    b"NaN",
    b": ",
    b'"',
    b"#",
    b"1e400",
    b"\r\n",
)


def bytes_of(rng: random.Random, data: bytes) -> bytes:
    """One change to bytes: cut, flipped, overwritten, inserted, repeated."""
    at = rng.randrange(len(data) + 1)
    change = rng.randrange(8)
    if change == 0:
        return data[:at]
    if change == 1 and data:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 8, 64))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if change == 2:
        return data[:at] + rng.choice(INSERTS) + data[at:]
    if change == 3:
        end = min(len(data), at + rng.choice((1, 8, 100)))
        return data[:at] + data[end:]
    if change == 4:
        return data[:at] + rng.randbytes(rng.choice((1, 8, 64))) + data[at + 8 :]
    lines = data.split(b"\n")
    line = rng.randrange(len(lines))
    if change == 5:
        del lines[line]
    elif change == 6:
        lines.insert(line, lines[rng.randrange(len(lines))])
    else:
        lines[line] = b"  " + lines[line] if rng.random() < 0.5 else lines[line].lstrip()
    return b"\n".join(lines)


def alias_bomb(rng: random.Random) -> bytes:
    """YAML whose aliases stand for more than memory holds."""
    depth = rng.choice((8, 12, 30))
    lines = [b"a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]".encode() for i in range(1, depth)]
    return b"\n".join(lines) + b"\n"


def file(rng: random.Random, path: Path) -> str:
    """Puts something else in the place of a file; says what."""
    kinds = ("fifo", "directory", "empty", "dangling link", "circular link", "device", "link outside", "socket", "huge")
    kind = rng.choice(kinds)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(path.parent)  # names of sockets are short
            made.bind(path.name[:90])
            os.chdir(here)
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 40)  # takes no space
    else:
        targets = {"dangling link": "nowhere", "circular link": path.name, "device": "/dev/zero"}
        path.symlink_to(targets.get(kind, "/etc/hostname"))
    return kind
