"""Device graphs: launches that are recorded once and then started together, on the same memory every time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hetero_megatron.platform.accelerator import Accelerator

Result = TypeVar("Result")


class Graph(Protocol):
    """What was captured: it reads and writes where the launches did."""

    def replay(self) -> None:
        """Start it on the current stream."""


class GraphPool:
    """Graphs of one device that share memory.

    What is released during a capture is free for this and later graphs of the pool; what lives on is theirs until all
    of them are gone. So they run one at a time, and what one leaves in released memory is lost when the next one runs.
    """

    def __init__(self, accelerator: Accelerator, stream: Any = None) -> None:
        """``stream``: that captures, not the default one; None: a new one. Backward has to be captured on the stream
        of its forward, where autograd runs it."""
        self._accelerator, self._stream = accelerator, accelerator.stream() if stream is None else stream
        self._memory: Any = None

    def capture(self, run: Callable[[], Result]) -> tuple[Graph, Result]:
        """The launches of ``run`` as a graph, and what it returns, which has values when the graph has run.

        Raises:
            RuntimeError: something that no graph can hold, such as a wait of the host.
        """
        stream = self._accelerator.current_stream()
        self._stream.wait_stream(stream)
        try:
            with self._accelerator.on_stream(self._stream):
                graph = self._accelerator.begin_capture(self._memory)
                try:
                    returned = run()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # which says once more that there is none
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            stream.wait_stream(self._stream)
        self._memory = graph.pool()
        return graph, returned
