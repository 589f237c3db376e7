"""Seconds of a device's own streams, by events: reading them never holds up the host while the device has work."""

from __future__ import annotations

from typing import Any, NamedTuple

from hetero_megatron.comm.hooks import Clock, Span
from hetero_megatron.platform.accelerator import Accelerator


class _Moment(NamedTuple):
    event: Any
    waits: int  # of the step, until then


class DeviceClock(Clock):
    """What the device computes is what passes on its stream, without the waits for transfers there.

    An event is recorded at every moment, and before and after every wait, on the stream on which the step began
    (transfers that another stream waits for hold up nothing here). Seconds are known when the device has passed the
    events: the caller synchronises with a later one first, which a step does anyway, for its loss.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._events: list[Any] = []  # of one step after the other
        self._used = 0
        self._waits: list[tuple[Any, Any, bool]] = []
        self._stream: Any = None

    def restart(self) -> None:
        self._used = 0
        self._waits.clear()
        self._stream = self._accelerator.current_stream()

    def moment(self) -> _Moment:
        return _Moment(self._record(), len(self._waits))

    def _record(self) -> Any:
        if self._used == len(self._events):
            self._events.append(self._accelerator.event(timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(self._stream)
        return event

    def span(self, begin: _Moment, end: _Moment) -> Span:
        neighbours = other_collectives = 0.0
        for wait_begin, wait_end, collective in self._waits[begin.waits : end.waits]:
            seconds = _seconds(wait_begin, wait_end)
            other_collectives += seconds if collective else 0.0
            neighbours += 0.0 if collective else seconds
        origin = self._events[0]
        start, stop = _seconds(origin, begin.event), _seconds(origin, end.event)
        return Span(start, stop, max(stop - start - neighbours - other_collectives, 0.0), neighbours)

    def wait_begins(self) -> Any:
        if self._stream is None or self._accelerator.current_stream() != self._stream:
            return None
        return self._record()

    def wait_ends(self, began: Any, collective: bool) -> None:
        if began is not None:
            self._waits.append((began, self._record(), collective))

    def pause(self) -> None:
        """Starting a transfer takes no time of the stream."""

    def resume(self, waited: float = 0.0) -> None:
        """See :meth:`pause`."""


def _seconds(before: Any, after: Any) -> float:
    return float(before.elapsed_time(after)) / 1e3
