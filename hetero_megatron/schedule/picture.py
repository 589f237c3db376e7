"""Timed schedules as one SVG: a row per stage, a rectangle per action, all pictures on the same time axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from hetero_megatron.schedule.actions import COMPUTE, in_flight
from hetero_megatron.schedule.simulate import Timed, Timeline

# Told apart with any colour vision, and readable on white and on black with white digits in them.
COLOURS = {"F": "#0072b2", "B": "#c4500a", "B_INPUT": "#a8588a", "W": "#00785a"}
MEANING = {
    "F": "F forward",
    "B": "B backward",
    "B_INPUT": "B_INPUT, gradient of the input",
    "W": "W, gradient of the weights",
}

_WIDTH, _LEFT, _RIGHT, _ROW, _HEAD, _GAP = 960, 64, 84, 20, 24, 14  # pixels
_DIGIT = 6.5  # width of a digit
_STYLE = """
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 11px; fill: #24292f }
text.title { font-size: 13px; font-weight: 600 }
text.number { fill: #fff; text-anchor: middle }
rect.page { fill: #fff }
rect.idle { fill: #eaeef2 }
@media (prefers-color-scheme: dark) {
  text { fill: #d0d7de }
  rect.page { fill: #0d1117 }
  rect.idle { fill: #21262d }
}
"""


@dataclass(frozen=True)
class Picture:
    """One schedule's picture."""

    title: str
    timeline: Timeline

    @property
    def in_flight(self) -> tuple[float, ...]:
        """Per stage, the most micro-batches that it holds at once; one in one of two chunks counts half."""
        schedule = self.timeline.schedule
        return tuple(micro_batches / schedule.chunks for micro_batches in in_flight(schedule))

    @property
    def bubble(self) -> float:
        """The part of all stages' time until the last of them ends in which they do not compute."""
        all_seconds = self.timeline.step_seconds * len(self.timeline.busy)
        return 1 - sum(self.timeline.busy) / all_seconds if all_seconds else 0.0


def svg(pictures: Sequence[Picture]) -> str:
    """The pictures below each other, with a legend; no scripts, no fonts, nothing loaded."""
    longest = max((p.timeline.step_seconds for p in pictures), default=0.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / (longest or 1.0)
    lines: list[str] = []
    top = _GAP + _HEAD
    for picture in pictures:
        lines += _panel(picture, top, scale)
        top += _HEAD + _ROW * len(picture.timeline.busy) + _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}">'
        f'<style>{_STYLE}</style><rect class="page" width="{_WIDTH}" height="{top}"/>'
    )
    kinds = {a.kind for p in pictures for row in p.timeline.schedule.stages for a in row}
    return "\n".join([head, *_legend(kinds), *lines, "</svg>\n"])


def _legend(kinds: set[str]) -> Iterator[str]:
    x = _LEFT
    for kind in COMPUTE:
        if kind in kinds:
            yield f'<rect x="{x}" y="{_GAP - 4}" width="12" height="12" fill="{COLOURS[kind]}"/>'
            yield f'<text x="{x + 17}" y="{_GAP + 6}">{MEANING[kind]}</text>'
            x += 40 + round(_DIGIT * len(MEANING[kind]))


def _panel(picture: Picture, top: int, scale: float) -> Iterator[str]:
    timeline = picture.timeline
    facts = f"step {timeline.step_seconds:.4g} s, bubble {picture.bubble:.1%}"
    yield f'<text class="title" x="{_LEFT}" y="{top + 14}">{escape(picture.title)}: {facts}</text>'
    for s, (row, micro_batches) in enumerate(zip(timeline.stages, picture.in_flight, strict=True)):
        y = top + _HEAD + s * _ROW
        yield f'<text x="8" y="{y + 14}">stage {s}</text>'
        yield f'<text x="{_WIDTH - _RIGHT + 8}" y="{y + 14}">{micro_batches:g} in flight</text>'
        width = timeline.step_seconds * scale
        yield f'<rect class="idle" x="{_LEFT}" y="{y + 1}" width="{width:.2f}" height="{_ROW - 2}"/>'
        for timed in row:
            if timed.action.kind in COLOURS:
                yield from _action(timed, y, scale)


def _action(timed: Timed, y: int, scale: float) -> Iterator[str]:
    """Later chunks are a little paler."""
    (kind, micro_batch, chunk), start, end = timed
    x, width = _LEFT + start * scale, (end - start) * scale
    pale = ' fill-opacity="0.8"' if chunk else ""
    yield (
        f'<rect x="{x:.2f}" y="{y + 1}" width="{max(width - 0.6, 0.2):.2f}" height="{_ROW - 2}" '
        f'fill="{COLOURS[kind]}"{pale}/>'
    )
    if width > _DIGIT * len(str(micro_batch)) + 2:
        yield f'<text class="number" x="{x + width / 2:.2f}" y="{y + 14}">{micro_batch}</text>'


def table(pictures: Sequence[Picture], against: str = "1f1b") -> str:
    """Step, bubble and memory of each in a text table; ``against``: the title that step times are compared with."""
    reference: Mapping[str, float] = {p.title: p.timeline.step_seconds for p in pictures}
    width = max((len(p.title) for p in pictures), default=8)
    lines = [f"{'schedule':{width}}  {'step s':>9}  {'speed':>7}  {'bubble':>7}  in flight per stage"]
    for p in pictures:
        step = p.timeline.step_seconds
        speed = f"{reference[against] / step:.3f}x" if against in reference and step else "-"
        in_flight = " ".join(f"{n:g}" for n in p.in_flight)
        lines.append(f"{p.title:{width}}  {step:9.4g}  {speed:>7}  {p.bubble:7.1%}  {in_flight}")
    return "\n".join(lines)
