"""Steps on a time axis as self-contained HTML: no network, no library."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.planner.report.prediction import format_prediction
from hetero_megatron.planner.report.timeline import group_title, groups, stage_label
from hetero_megatron.planner.simulate.step import Prediction

KINDS = ("F", "B", "B_INPUT", "W", "gradients", "optimizer", "parameters", "rest")

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
pre { background: #f6f6f6; padding: 1em; overflow: auto }
canvas { width: 100%; border: 1px solid #ccc; cursor: grab; touch-action: none }
.legend span { display: inline-block; margin-right: 1.2em }
.legend i { display: inline-block; width: 1em; height: 1em; margin-right: .4em; vertical-align: -2px }
#tip { position: fixed; background: #222; color: #fff; padding: 2px 8px; pointer-events: none; display: none }
"""

_SCRIPT = """
const colors = {F: '#4c8bf5', B: '#34a06f', B_INPUT: '#34a06f', W: '#8ecfae', gradients: '#e0a020',
                optimizer: '#b05fd0', parameters: '#d9654f', rest: '#b9b9b9'};
const row = 22, left = 10, head = 18;
for (const chart of DATA.charts) {
  const canvas = document.getElementById(chart.id), tip = document.getElementById('tip');
  let from = 0, to = DATA.step, drag = null;
  canvas.height = (chart.rows.length * row + head) * devicePixelRatio;
  canvas.style.height = chart.rows.length * row + head + 'px';
  const x = (t) => left + (t - from) / (to - from) * (canvas.clientWidth - 2 * left);
  const time = (px) => from + (px - left) / (canvas.clientWidth - 2 * left) * (to - from);
  function draw() {
    canvas.width = canvas.clientWidth * devicePixelRatio;
    const c = canvas.getContext('2d');
    c.scale(devicePixelRatio, devicePixelRatio);
    c.font = '11px system-ui';
    c.fillStyle = '#666';
    for (let i = 0; i <= 10; i++) {
      const t = from + (to - from) * i / 10;
      c.fillText(t.toPrecision(4) + ' s', x(t), 12);
    }
    chart.rows.forEach((spans, r) => {
      const y = head + r * row;
      for (const [kind, start, length, label] of spans) {
        const a = x(start), b = x(start + length);
        if (b < 0 || a > canvas.clientWidth) continue;
        c.fillStyle = colors[DATA.kinds[kind]];
        c.fillRect(a, y + 2, Math.max(b - a - 0.5, 0.5), row - 4);
        if (b - a > 22 && label >= 0) { c.fillStyle = '#fff'; c.fillText(label, a + 4, y + 15); }
      }
    });
  }
  canvas.onwheel = (e) => {
    e.preventDefault();
    const t = time(e.offsetX), f = e.deltaY > 0 ? 1.25 : 0.8;
    from = Math.max(0, t - (t - from) * f); to = Math.min(DATA.step, t + (to - t) * f); draw();
  };
  canvas.onpointerdown = (e) => { drag = [e.offsetX, from, to]; canvas.setPointerCapture(e.pointerId); };
  canvas.onpointerup = () => { drag = null; };
  canvas.ondblclick = () => { from = 0; to = DATA.step; draw(); };
  canvas.onpointerleave = () => { tip.style.display = 'none'; };
  canvas.onpointermove = (e) => {
    if (drag) {
      const move = (e.offsetX - drag[0]) / (canvas.clientWidth - 2 * left) * (drag[2] - drag[1]);
      const length = drag[2] - drag[1];
      from = Math.min(Math.max(0, drag[1] - move), DATA.step - length); to = from + length; draw();
    }
    const r = Math.floor((e.offsetY - head) / row), t = time(e.offsetX);
    const hit = (chart.rows[r] || []).find(([k, s, l]) => s <= t && t <= s + l);
    tip.style.display = hit || chart.labels[r] ? 'block' : 'none';
    tip.style.left = e.clientX + 14 + 'px'; tip.style.top = e.clientY + 14 + 'px';
    const what = hit ? DATA.kinds[hit[0]] + (hit[3] >= 0 ? ' ' + hit[3] : '') + ': ' + hit[2].toPrecision(4) + ' s' +
      ' at ' + hit[1].toPrecision(5) + ' s' : 'waiting';
    tip.textContent = chart.labels[r] + ' | ' + what;
  };
  addEventListener('resize', draw);
  draw();
}
"""


LEGEND = {
    "forward": "#4c8bf5", "backward": "#34a06f", "gradients": "#e0a020", "optimizer": "#b05fd0",
    "parameters": "#d9654f",
}  # fmt: skip


def html_page(found: Prediction, title: str) -> str:
    """The page: figures as text, one chart per distinct pipeline (wheel zooms, dragging moves, double click resets)."""
    heading = f"{title}: predicted step"
    body = f"<h1>{html.escape(heading)}</h1><pre>{html.escape(format_prediction(found))}</pre>"
    return page(heading, body + charts_html(prediction_charts(found), found.step_seconds))


def page(title: str, body: str, style: str = "") -> str:
    """A whole document."""
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}{style}</style></head><body>{body}</body></html>\n"
    )


def prediction_charts(found: Prediction) -> list[dict[str, Any]]:
    """A chart per distinct pipeline: title, labels of its rows, rows of [kind, start, seconds, micro-batch or -1]."""
    return [{"title": group_title(found, group), **_chart(found, group.pipelines[0])} for group in groups(found)]


def charts_html(
    charts: Sequence[Mapping[str, Any]], seconds: float, prefix: str = "chart", legend: Mapping[str, str] = LEGEND
) -> str:
    """Legend, canvases and script for charts as in :func:`prediction_charts`, on one axis; once per page."""
    numbered = [{**chart, "id": f"{prefix}{i}"} for i, chart in enumerate(charts)]
    canvases = "".join(f"<h3>{html.escape(c['title'])}</h3><canvas id='{c['id']}'></canvas>" for c in numbered)
    data = json.dumps({"step": seconds, "kinds": KINDS, "charts": numbered}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # in names: neither an end nor a comment of HTML inside the script
    keys = "".join(f"<span><i style='background:{c}'></i>{name}</span>" for name, c in legend.items())
    script = f"<script>const DATA = {data};{_SCRIPT}</script>"
    return f"<p class='legend'>{keys}</p>{canvases}<div id='tip'></div>{script}"


def _chart(found: Prediction, pipeline: int) -> dict[str, Any]:
    """Rows of (kind, start, length, micro-batch or -1), one row per stage."""
    timeline = found.timelines[pipeline]
    rows = []
    for s, row in enumerate(timeline.schedule.stages):
        spans = [
            [KINDS.index(a.kind), _round(start), _round(end - start), a.micro_batch]
            for a, start, end in zip(row, timeline.starts[s], timeline.ends[s])
            if a.kind in KINDS
        ]
        at = found.computed_seconds
        for part in ("gradients", "optimizer", "parameters"):
            spans.append([KINDS.index(part), _round(at), _round(found.parts[part]), -1])
            at += found.parts[part]
        rows.append(spans)
    return {"labels": [stage_label(found, pipeline, s) for s in range(len(rows))], "rows": rows}


def _round(seconds: float) -> float:
    return float(f"{seconds:.6g}")
