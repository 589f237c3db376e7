"""Fast pipeline times against the simulator, for schedules that have no fast path."""

from __future__ import annotations

import pytest

from hetero_megatron.planner.estimate.pipeline_time import seconds
from hetero_megatron.schedule import Action, Costs, generate, lowered, simulate
from hetero_megatron.schedule.generators import GENERATORS


def test_a_schedule_without_a_fast_path_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPipe with its backwards in the other order, which no recurrence knows."""

    def reverse(stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        rows = generate("gpipe", stages, micro_batches).stages
        return tuple(row[:micro_batches] + row[micro_batches:][::-1] for row in rows)

    monkeypatch.setitem(GENERATORS, "reverse", reverse)
    forward, backward, link = [1.0, 2.0, 0.5], [1.5, 2.5, 1.0], [(0.1, 0.2), (0.3, 0.1)]
    costs = Costs(forward, backward, [a for a, _ in link], link_back=[b for _, b in link])
    expected = simulate(lowered("reverse", 3, 5), costs).step_seconds
    assert seconds(forward, backward, link, 5, "reverse") == expected
