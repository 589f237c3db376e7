"""The frame of a page, and charts of actions on a time axis: self-contained HTML, no network, no library."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.html.pictures import STYLE, ink, legend
from hetero_megatron.schedule import Action

LATER = ", later chunk"  # of an action: its layers are not the first run of its stage
KIND_COLORS = {  # in the order of the numbers by which run files name them
    "F": "#4c8bf5", "B": "#34a06f", "B_INPUT": "#1d7f8c", "W": "#8a8420", "gradients": "#e0a020",
    "optimizer": "#b05fd0", "parameters": "#d9654f", "rest": "#b9b9b9",
    f"F{LATER}": "#a9c8fb", f"B{LATER}": "#96d3b5", f"B_INPUT{LATER}": "#84c3cc", f"W{LATER}": "#cbc679",
}  # fmt: skip
KINDS = tuple(KIND_COLORS)
_MEANING = {
    "F": "forward (F)", "B": "backward (B)", "B_INPUT": "backward for the input (B_INPUT)",
    "W": "backward for the weights (W)", "rest": "rest of the step",
}  # fmt: skip

_STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1f2328; --dim: #5d6670; --line: #d5d9de; --panel: #f2f4f6 }
@media (prefers-color-scheme: dark) {
  :root { --bg: #15181c; --fg: #e4e7ea; --dim: #a0a9b3; --line: #3a4048; --panel: #22272d } }
* { box-sizing: border-box }
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 16px; max-width: 1180px;
  color: var(--fg); background: var(--bg) }
h1 { font-size: 1.6em; overflow-wrap: anywhere } h2 { margin: 1.8em 0 .4em; font-size: 1.25em }
h3 { font-size: 1em; margin: 1em 0 .3em; overflow-wrap: anywhere } p { overflow-wrap: anywhere }
pre { background: var(--panel); padding: 1em; overflow: auto; font-size: 12px }
.note { color: var(--dim); margin: 0 0 .6em }
.big { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 1em 0 } .big b { display: block; font-size: 1.5em }
.wide { overflow-x: auto } summary { cursor: pointer; color: var(--dim) }
canvas { width: 100%; border: 1px solid var(--line); cursor: grab; touch-action: pan-y }
.legend span { display: inline-block; margin-right: 1.2em }
.legend i { display: inline-block; width: 1em; height: 1em; margin-right: .4em; vertical-align: -2px }
#tip { position: fixed; background: #222; color: #fff; padding: 2px 8px; pointer-events: none; display: none }
"""

_SCRIPT = """
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
    c.fillStyle = getComputedStyle(document.body).color;
    const ticks = Math.max(1, Math.floor(canvas.clientWidth / 90));
    for (let i = 0; i < ticks; i++) {
      const t = from + (to - from) * i / ticks;
      c.fillText(t.toPrecision(4) + ' s', x(t), 12);
    }
    chart.rows.forEach((spans, r) => {
      const y = head + r * row;
      for (const [kind, start, length, label] of spans) {
        const a = x(start), b = x(start + length);
        if (b < 0 || a > canvas.clientWidth) continue;
        c.fillStyle = DATA.colors[kind];
        c.fillRect(a, y + 2, Math.max(b - a - 0.5, 0.5), row - 4);
        if (b - a > 22 && label >= 0) { c.fillStyle = DATA.inks[kind]; c.fillText(label, a + 4, y + 15); }
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
    tip.style.left = Math.min(e.clientX + 14, innerWidth / 2) + 'px'; tip.style.top = e.clientY + 14 + 'px';
    const what = hit ? DATA.kinds[hit[0]] + (hit[3] >= 0 ? ' ' + hit[3] : '') + ': ' + hit[2].toPrecision(4) + ' s' +
      ' at ' + hit[1].toPrecision(5) + ' s' : 'waiting';
    tip.textContent = chart.labels[r] + ' | ' + what;
  };
  addEventListener('resize', draw);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  draw();
}
"""


def section(title: str, note: str = "") -> str:
    """A heading with a sentence below it."""
    return f"<h2>{html.escape(title)}</h2>" + (f"<p class='note'>{html.escape(note)}</p>" if note else "")


def figures(*rows: tuple[str, str]) -> str:
    """What is read first: (what it is, figure)."""
    shown = "".join(f"<div><b>{html.escape(figure)}</b>{html.escape(label)}</div>" for label, figure in rows)
    return f"<div class='big'>{shown}</div>"


def page(title: str, body: str, style: str = "") -> str:
    """A whole document; it needs nothing else, and fits phones and dark screens."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}{STYLE}{style}</style></head><body>{body}</body></html>\n"
    )


def kind_of(action: Action) -> str:
    """The one of ``KINDS`` that an F, B, B_INPUT or W is drawn as."""
    return action.kind + (LATER if action.chunk else "")


def charts_html(charts: Sequence[Mapping[str, Any]], seconds: float, prefix: str = "chart") -> str:
    """Legend, canvases and script of charts on one axis; once per page.

    Args:
        charts: each with ``title``, ``labels`` of its rows, and ``rows`` of [index in ``KINDS``, start (s), seconds,
            micro-batch or -1].
        seconds: end of the axis.
    """
    drawn = {span[0] for chart in charts for row in chart["rows"] for span in row if span[2] > 0}
    keys = {
        _MEANING.get(kind.removesuffix(LATER), kind) + (LATER if kind.endswith(LATER) else ""): color
        for i, (kind, color) in enumerate(KIND_COLORS.items())
        if i in drawn
    }
    numbered = [{**chart, "id": f"{prefix}{i}"} for i, chart in enumerate(charts)]
    canvases = "".join(f"<h3>{html.escape(c['title'])}</h3><canvas id='{c['id']}'></canvas>" for c in numbered)
    colors = [*KIND_COLORS.values()]
    page_data = {"step": seconds, "kinds": KINDS, "colors": colors, "inks": [*map(ink, colors)], "charts": numbered}
    data = json.dumps(page_data, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # in names: neither an end nor a comment of HTML inside the script
    script = f"<script>const DATA = {data};{_SCRIPT}</script>"
    return f"{legend(keys)}{canvases}<div id='tip'></div>{script}"
