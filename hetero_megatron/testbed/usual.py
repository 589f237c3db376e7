"""How fast a core of this machine usually is: the unit of speeds under ``soft``, kept between runs.

Calibrations and the runs that are compared with them must mean the same by "speed 0.5", although the machine may have
become slower meanwhile (:mod:`hetero_megatron.comm.yardstick`). So the first one measures the unit and all later ones
use it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hetero_megatron.errors import UserError
from hetero_megatron.testbed.load import watch_load
from hetero_megatron.testbed.settings import Settings
from hetero_megatron.testbed.state import write_json

SECONDS = 4.0  # of reading


@dataclass(frozen=True)
class Work:
    """The pieces of work that readings are; here because the launcher, which does not import torch, keeps their unit.

    Attributes:
        size: of square matrices. rows: so many of them a small operator works on: where another thread of the core
            computes these slow down most, layers little.
        far: elements that are read first, not timed, after a pause: more than the near caches hold.
        cold_products, cold_operators: what comes then, 0.2 ms; also first, not timed, in the midst of other work.
        warm_products, warm_operators: what comes there, 0.5 ms.
    """

    size: int = 128
    rows: int = 64
    far: int = 3 << 17
    cold_products: int = 2
    cold_operators: int = 12
    warm_products: int = 8
    warm_operators: int = 60


WORK = Work()


class Unit(NamedTuple):
    """What a core usually takes: CPU seconds of a reading right after a pause, and of one in the midst of work."""

    cold: float
    warm: float


def with_unit(settings: Settings) -> Settings:
    """The settings, with what speed 1 means where that is not a constant.

    Raises:
        UserError: it cannot be measured.
    """
    if settings.chips != "soft":
        return settings
    usual, kept = unit_of_speed(sorted(set(settings.cores)))
    note = f"chips: speed 1 is a core whose yardstick takes {usual.warm * 1e3:.3g} ms ({kept})"
    return replace(settings, usual=usual, notes=(*settings.notes, note))


def unit_file() -> Path:
    """Where units are kept, by processor and piece of work."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "hetero_megatron" / "yardstick.json"


def unit_of_speed(cores: Sequence[int]) -> tuple[Unit, str]:
    """CPU seconds that a yardstick's readings usually take on ``cores``, and where that comes from, in words.

    Of several who want to know at the same time one measures; the others wait, and take what it found.
    """
    path, key = unit_file(), _key()
    kept = f"kept in {path}"
    if (found := _known(path).get(key)) is not None:
        return found, kept
    measured: tuple[Unit, str] | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := _known(path).get(key)) is not None:
                return found, kept
            measured = _measure(cores)
            write_json(path, {**_known(path), key: measured[0]})
            return measured[0], kept + measured[1]
    except OSError:
        unit, doubt = measured or _measure(cores)
        return unit, f"measured now; it cannot be kept, so other runs are not comparable{doubt}"


def _known(path: Path) -> dict[str, Unit]:
    with suppress(OSError, ValueError, TypeError):
        found = json.loads(path.read_text(encoding="utf-8"))
        units = {key: Unit(*map(float, kept)) for key, kept in dict(found).items() if isinstance(kept, list)}
        return {key: unit for key, unit in units.items() if all(0.0 < seconds < 1.0 for seconds in unit)}
    return {}


def _measure(cores: Sequence[int]) -> tuple[Unit, str]:
    """And a doubt about it, in words, if there is one. By a process of its own: the launcher does not import torch."""
    words = f"{SECONDS}, {list(cores)}"
    script = f"from hetero_megatron.comm.yardstick import usual_readings; print(*usual_readings({words}))"
    with watch_load() as load:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"the speed of a core cannot be measured: {why}", field="--chips", value="soft",
                        accepted="--chips clock, which needs no measurement")  # fmt: skip
    doubt = f"; measured while others used {load.foreign:.2f} cores: remove it when they do not"
    return Unit(*map(float, done.stdout.split())), doubt if load.disturbed else ""


def _key() -> str:
    """Of this processor, as a home may be shared by unlike machines, and of the pieces of work on a core kept awake."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {WORK}, awake"
