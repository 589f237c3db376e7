"""The load of experts and of the ranks that compute them, on a run's page. No torch."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hetero_megatron.html.page import section
from hetero_megatron.html.pictures import COLORS, Bar, Line, bars, curve
from hetero_megatron.monitoring.run_files import RunFiles

MOST_LAYERS, MOST_EXPERTS = 128, 512  # that are drawn
EXPERT_STYLE = """
.experts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 10px; align-items: center }
.experts div { display: flex; height: 14px } .experts i { flex: 1; background: #4c8bf5; opacity: var(--o) }
"""


def expert_sections(run: RunFiles, start: Mapping[str, Any] | None) -> list[str]:
    """Nothing for a dense model."""
    rows = [(s["step"], s) for s in run.steps if "expert_load" in s]
    if not rows:
        return []
    worst = [(step, max(s["expert_load"]["max_over_mean"].values(), default=None)) for step, s in rows]
    losses = [
        Line(name.replace("_", " "), [(step, s.get(name)) for step, s in rows], COLORS[1 + i])
        for i, name in enumerate(("load_balancing_loss", "z_loss"))
    ]
    note = "tokens of the busiest expert over the mean, in the layer where that is most; losses that balance"
    parts = [section("Balance of experts", note), curve([Line("busiest expert", worst, COLORS[0]), *losses], [])]
    parts += [section("Experts computed by ranks", "median per step of tokens x experts"), _ranks(rows, start)]
    if (event := run.last("experts")) is not None:
        parts += [section("Load of every expert", "a row per layer, dark: chosen often"), _map(event["layers"])]
    return parts


def _ranks(rows: Sequence[tuple[int, Mapping[str, Any]]], start: Mapping[str, Any] | None) -> str:
    rows_of_steps = [s["expert_load"]["rank_rows"] for step, s in rows if start is None or step >= start["first_step"]]
    ranks = (start or {}).get("ranks") or range(min(map(len, rows_of_steps), default=0))
    chips = (start or {}).get("chips", {})
    rank_bars = []
    for position, rank in enumerate(ranks):
        counts = [row[position] for row in rows_of_steps if position < len(row)]
        if counts:
            name, middle = f"rank {rank} {chips.get(str(rank), '')}".strip(), median(counts)
            rank_bars.append(Bar(name, f"{middle:,.0f}", ((COLORS[0], middle),)))
    return bars(rank_bars)


def _map(layers: Mapping[str, Sequence[int]]) -> str:
    out = []
    for layer, counts in sorted(layers.items(), key=lambda item: int(item[0]))[:MOST_LAYERS]:
        peak, total = max(counts) or 1, sum(counts) or 1
        cells = "".join(
            f"<i style='--o:{0.05 + 0.95 * n / peak:.2f}' title='expert {e}: {n * len(counts) / total:.2f} x mean'></i>"
            for e, n in enumerate(counts[:MOST_EXPERTS])
        )
        out.append(f"<span>{html.escape(f'layer {layer}')}</span><div>{cells}</div>")
    return f"<div class='experts'>{''.join(out)}</div>"
