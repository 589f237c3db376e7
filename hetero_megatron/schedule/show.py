"""Schedules as text."""

from __future__ import annotations

from hetero_megatron.schedule.actions import Action, Schedule


def format_grid(schedule: Schedule, error: tuple[int, int] | None = None, most: int = 24) -> str:
    """One row per stage, one column per place in its list.

    Args:
        error: (stage, index of its action) to mark with ``<-- ERROR HERE``.
        most: columns shown: a window around the error, else from the start.
    """
    first = max(0, error[1] - most // 2) if error else 0
    rows = [[str(Action(*a)) for a in row[first : first + most]] for row in schedule.stages]
    width = max((len(cell) for row in rows for cell in row), default=1)
    lines = []
    for stage, (row, cells) in enumerate(zip(schedule.stages, rows)):
        cells = [cell.ljust(width) for cell in cells]
        if error and error[0] == stage:
            cells[error[1] - first] += " <-- ERROR HERE"
        before, after = ("… " if first else ""), (" …" if len(row) > first + most else "")
        lines.append(f"stage {stage}: {before}{' '.join(cells)}{after}".rstrip())
    return "\n".join(lines)
