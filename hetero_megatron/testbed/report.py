"""Messages of the launcher: the testbed's configuration with reasons, and how the run ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_megatron.cluster import format_bytes, format_rate
from hetero_megatron.testbed.clocks import Kept
from hetero_megatron.testbed.load import LoadMonitor
from hetero_megatron.testbed.settings import Settings, describe_links
from hetero_megatron.testbed.state import write_json

MEANING = {  # of results, by kind of chips; wherever they are reported
    "clock": "emulated clock: errors are schedule + communication errors",
    "soft": "CPU time stretched", "none": "real",
}  # fmt: skip


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Args:
        code: the launcher's exit code; codes: those of ranks that ended by themselves.
        latencies: measured one-way seconds, by pair of node groups.
        unheard: ranks that should have been slowed but never reported that their start-up was over.
        clock: quality of emulated clocks; None if there were none, or no rank has computed yet.
    """

    code: int
    codes: Mapping[int, int]
    latencies: Mapping[str, float]
    load: LoadMonitor
    unheard: Sequence[int]
    clock: Kept | None


def describe(settings: Settings, latencies: Mapping[str, float]) -> list[str]:
    """The testbed's configuration and its reasons."""
    chips = ", ".join(f"{name} {chip.speed:g}" for name, chip in settings.cluster.chips.items() if chip.speed)
    lines = [f"chips: {settings.chips} ({settings.reasons['chips']})" + (f"; speeds {chips}" if chips else "")]
    lines.append(f"links: {settings.links} ({settings.reasons['links']})")
    for name, _, _, rate in describe_links(settings) if settings.links != "none" else []:
        measured = f", {latencies[name] * 1e6:.0f} us one way (measured)" if name in latencies else ""
        lines.append(f"  {name}: {format_rate(rate) if rate else 'not shaped'}{measured}")
    cores = {core: [r for r, c in enumerate(settings.cores) if c == core] for core in sorted(set(settings.cores))}
    lines.append("cores: " + "; ".join(f"{core}: ranks {', '.join(map(str, r))}" for core, r in cores.items()))
    if settings.memory:
        lines.append("memory: limited to " + ", ".join(format_bytes(limit) for limit in settings.memory))
    return lines + list(settings.notes)


def say(text: str) -> None:
    """Print to standard error; standard output belongs to the command."""
    print(f"testbed: {text}" if not text.startswith("testbed ") else text, file=sys.stderr, flush=True)


def write_report(settings: Settings, outcome: RunOutcome, log_dir: Path | None) -> None:
    """Print the closing lines, and write ``testbed.json`` to the logs."""
    if outcome.unheard:
        settings_text = f"chips {settings.chips}" + (", links paced" if settings.links == "paced" else "")
        ranks = ", ".join(map(str, outcome.unheard))
        say(f"ranks {ranks} never said that their start-up was over: nothing was emulated in them ({settings_text})")
    load, code, clock = outcome.load, outcome.code, outcome.clock
    if clock is not None and clock.invalid:
        say(clock.complaint())
    chips = f"chips {settings.chips} ({MEANING[settings.chips]})"
    say(f"{load.summary()}; {chips}, links {settings.links}; exit code {code}")
    if log_dir is None:
        return
    summary = {
        "chips": settings.chips, "links": settings.links, "reasons": settings.reasons, "notes": list(settings.notes),
        "speeds": list(settings.speeds), "cores": list(settings.cores),
        "latency_seconds": dict(outcome.latencies), "exit_codes": dict(outcome.codes), "exit_code": code,
        **load.facts(), "not_emulated": list(outcome.unheard), **(clock.facts() if clock is not None else {}),
    }  # fmt: skip
    write_json(log_dir / "testbed.json", summary)
