"""Schedules as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_megatron.schedule.actions import Action, Schedule


def format_grid(schedule: Schedule, error: tuple[int, int] | None = None, most: int = 24) -> str:
    """One row per stage, one column per place in its list.

    Args:
        error: (stage, index of its action) to mark with ``<-- ERROR HERE``.
        most: columns shown: a window around the error, else from the start.
    """
    rows = {f"stage {s}": row for s, row in enumerate(schedule.stages)}
    return format_rows(rows, (f"stage {error[0]}", error[1]) if error else None, most)


def format_rows(
    rows: Mapping[str, Sequence[Action]], error: tuple[str, int] | None = None, most: int = 24, last: int = 0
) -> str:
    """:func:`format_grid` for rows of any name; ``error``: (row, index of its action); ``last``: so many columns from
    the end of each row are shown, too."""
    first = max(0, error[1] - most // 2) if error else 0
    texts = {name: [str(Action(*a)) for a in row[first : first + most]] for name, row in rows.items()}
    rest = {name: row[max(first + most, len(row) - last) :] if last else () for name, row in rows.items()}
    ends = {name: [str(Action(*a)) for a in row] for name, row in rest.items()}
    width = max((len(cell) for part in (texts, ends) for cells in part.values() for cell in cells), default=1)
    lines = []
    for name, cells in texts.items():
        cells = [cell.ljust(width) for cell in cells]
        if error and error[0] == name:
            cells[error[1] - first] += " <-- ERROR HERE"
        cut = len(rows[name]) > first + most + len(ends[name])
        after = [*(["…"] if cut else []), *(cell.ljust(width) for cell in ends[name])]
        lines.append(f"{name}: {'… ' if first else ''}{' '.join([*cells, *after])}".rstrip())
    return "\n".join(lines)
