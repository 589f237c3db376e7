"""What ``hetero-megatron top`` shows of a run that is going on, from what it writes; no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hetero_megatron.errors import printable
from hetero_megatron.monitoring.console import format_duration
from hetero_megatron.monitoring.run_files import RunFiles
from hetero_megatron.predictor.report.prediction import format_seconds

LAST_STEPS = 20  # that what is shown is the median of
BAR = 24
SPARKS = "▁▂▃▄▅▆▇█"
MOST_RANKS, MOST_EVENTS = 40, 4


@dataclass(frozen=True)
class RankLoad:
    """Shares of a step: computing, waiting for neighbours, in other communication."""

    rank: int
    chip: str
    busy: float
    bubble: float
    waiting: float


@dataclass(frozen=True)
class LiveView:
    """Attributes:
    seconds: of a step; eta: seconds left; None: not known; silent: seconds since the last step was written.
    changed: how ranks of an elastic run came or went last, and how long that took; empty: they did not.
    """

    step: int
    steps: int | None
    loss: float | None
    seconds: float
    tokens_per_second: float
    eta: float | None
    silent: float
    losses: Sequence[float]
    ranks: Sequence[RankLoad]
    events: Sequence[str]
    changed: str
    ended: str


def live_view(run: RunFiles, now: float | None = None, written: float | None = None) -> LiveView:
    """Of what a run has written so far.

    Args:
        written: when its metrics were last changed, in seconds since 1970.
    """
    start, last = run.last("start"), run.steps[-1]
    recent = run.steps[-LAST_STEPS:]
    seconds = median(s["step_seconds"] for s in recent)
    steps = (start or {}).get("steps")
    seconds_left = max(0, steps - last["step"]) * seconds if steps is not None else None
    ended = _ended(run)
    now = time.time() if now is None else now
    return LiveView(
        last["step"], steps, last["loss"], seconds, median(s["tokens"] / max(s["step_seconds"], 1e-9) for s in recent),
        0.0 if ended else seconds_left, max(0.0, now - (now if written is None else written)),
        [s["loss"] for s in run.steps[-BAR:] if s["loss"] is not None], _loads(recent, start),
        [e["text"] for e in run.events if e["kind"] not in ("timeline", "start", "elastic")][-MOST_EVENTS:],
        str((run.last("elastic") or {}).get("text", "")), ended,
    )  # fmt: skip


def _ended(run: RunFiles) -> str:
    """How the last start of the run ended; empty: it has not."""
    for event in reversed(run.events):
        if event["kind"] in ("end", "start"):
            return str(event["text"]) if event["kind"] == "end" else ""
    return ""


def _loads(steps: Sequence[Mapping[str, Any]], start: Mapping[str, Any] | None) -> list[RankLoad]:
    keys = ("busy_seconds", "bubble_seconds", "communication_seconds")
    rows = [s for s in steps if all(s.get(key) for key in keys) and s["step_seconds"] > 0]
    if not rows:
        return []
    count = min(len(s[key]) for s in rows for key in keys)
    ranks = (start or {}).get("ranks", range(count))
    chips = (start or {}).get("chips", {})
    shares = [[median(s[key][i] / s["step_seconds"] for s in rows) for key in keys] for i in range(count)]
    return [RankLoad(rank, chips.get(str(rank), ""), *row) for rank, row in zip(ranks, shares, strict=False)]


def render(view: LiveView, name: str) -> Group:
    """For a terminal, by rich."""
    head = Text()
    of_steps = f"/{view.steps:,}" if view.steps is not None else ""
    head.append(f"step {view.step:,}{of_steps}", style="bold")
    head.append(f"   loss {view.loss:.4f}" if view.loss is not None else "   loss not finite")
    head.append(f"   {format_seconds(view.seconds)} per step   {view.tokens_per_second:,.0f} tokens/s")
    if view.ended:
        head.append(f"   {view.ended}", style="green")
    elif view.eta is not None:
        head.append(f"   ETA {format_duration(view.eta)}")
    if not view.ended and view.silent > max(30.0, 5 * view.seconds):
        head.append(f"   nothing written for {format_duration(view.silent)}", style="red")
    table = Table(box=None, padding=(0, 1))
    for title in ("rank", "chip", "busy", "bubble", "waiting", ""):
        table.add_column(title, justify="left" if title in ("chip", "") else "right", no_wrap=True)
    for load in view.ranks[:MOST_RANKS]:
        cells = [f"{share:.0%}" for share in (load.busy, load.bubble, load.waiting)]
        table.add_row(str(load.rank), escape(load.chip), *cells, _bar(load))
    parts: list[Any] = [head, Text(f"loss {sparkline(view.losses)}", style="cyan"), table]
    if len(view.ranks) > MOST_RANKS:
        parts.append(Text(f"and {len(view.ranks) - MOST_RANKS} more ranks"))
    if view.changed:
        parts.append(Text(printable(view.changed), style="magenta"))
    parts += [Text(printable(text), style="yellow", overflow="ellipsis", no_wrap=True) for text in view.events]
    return Group(Panel(Group(*parts), title=escape(name)))


def _bar(load: RankLoad) -> Text:
    text = Text()
    cells_used = 0
    for share, mark, style in ((load.busy, "█", "blue"), (load.bubble, "░", "white"), (load.waiting, "▒", "yellow")):
        cells = min(BAR - cells_used, round(BAR * share))
        text.append(mark * max(cells, 0), style=style)
        cells_used += max(cells, 0)
    return text


def sparkline(values: Sequence[float]) -> str:
    """A letter per value, the lowest and the highest one of which span the scale."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((v - low) * scale)] for v in values)
