"""Do all ranks meet in the same order? Run the collectives of every rank without time, each waiting for all members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetero_megatron.schedule.actions import Action
from hetero_megatron.schedule.show import format_rows
from hetero_megatron.schedule.validate import ScheduleError

Groups = Callable[[int, Action], Sequence[tuple[int, ...]]]
SHOWN = 8

Meeting = tuple[Action, tuple[int, ...]]



class _Numbers:
    """Equal groups -> one number: a group may have hundreds of ranks, and is looked up for each of them."""

    def __init__(self) -> None:
        self._by_identity: dict[int, int] = {}
        self.groups: list[tuple[int, ...]] = []  # one of every value, and what the identities belong to
        self._by_value: dict[tuple[int, ...], int] = {}
        self._kept: list[tuple[int, ...]] = []

    def __call__(self, group: tuple[int, ...]) -> int:
        number = self._by_identity.get(id(group))
        if number is None:
            number = self._by_value.setdefault(group, len(self.groups))
            if number == len(self.groups):
                self.groups.append(group)
            self._by_identity[id(group)] = number
            self._kept.append(group)  # an identity is nobody else's as long as its owner lives
        return number


def validate_collectives(rows: Mapping[int, Sequence[Action]], groups: Groups) -> None:
    """Prove that any two ranks meet their common collectives in the same order, and that no ring of ranks waits.

    A rank meets the groups of its actions one after the other; a meeting ends when all its members are at it. That is
    stricter than asynchronous REDUCEs need, so it holds for backends that may block at any collective.

    Args:
        rows: the actions of every rank; ranks of one stage share one sequence.
        groups: of a rank in an action, each with at least two members.

    Raises:
        ScheduleError: a rank that never meets the others, with the rows of those concerned.
    """
    numbers = _Numbers()
    meetings = {rank: _meetings(rank, row, rows, groups, numbers) for rank, row in rows.items()}
    at = dict.fromkeys(rows, 0)
    waiting: dict[tuple[Action, int], set[int]] = {}
    ready = list(rows)
    while ready:
        rank = ready.pop()
        mine = meetings[rank]
        if at[rank] == len(mine):
            continue
        key = mine[at[rank]][1:]
        there = waiting.setdefault(key, set())
        there.add(rank)
        members = numbers.groups[key[1]]
        if len(there) == len(members):
            del waiting[key]
            for member in members:
                at[member] += 1
                ready.append(member)
    stuck = {rank: meetings[rank][at[rank]] for rank in rows if at[rank] < len(meetings[rank])}
    if stuck:
        raise _error(rows, {rank: (i, (action, numbers.groups[n])) for rank, (i, action, n) in stuck.items()})


def _meetings(
    rank: int, row: Sequence[Action], rows: Mapping[int, Sequence[Action]], groups: Groups, numbers: _Numbers
) -> list[tuple[int, Action, int]]:
    """(index of the action, action, number of the group) of one rank's meetings, from the first action in which it
    meets ranks of other rows on: before, all members do the same list, so they cannot but be in order."""
    found, foreign = [], False
    for i in range(len(row)):
        action = row[i]
        for group in groups(rank, action):
            foreign = foreign or any(rows.get(r) is not row for r in group)
            if foreign:
                found.append((i, action, numbers(group)))
    return found


def _error(rows: Mapping[int, Sequence[Action]], stuck: Mapping[int, tuple[int, Meeting]]) -> ScheduleError:
    """Marks a rank whose partner waits elsewhere (or is done)."""
    for rank, (i, (action, group)) in sorted(stuck.items()):
        other = next(r for r in group if r not in stuck or stuck[r][1] != (action, group))
        instead = "ended"
        if other in stuck:
            action_there, group_there = stuck[other][1]
            instead = f"is at {Action(*action_there)} with {_ranks(group_there)}"
        text = f"rank {rank}: {Action(*action)} with {_ranks(group)} never begins: rank {other} of them {instead}"
        shown = [rank, *[r for r in group if r != rank]][:SHOWN]
        labelled = {f"rank {r}": rows[r] for r in sorted(shown) if r in rows}
        return ScheduleError(f"{text}\n{format_rows(labelled, (f'rank {rank}', i))}")
    raise AssertionError("somebody is stuck")


def _ranks(group: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, group[:SHOWN]))}{', …' if len(group) > SHOWN else ''}"
