"""Do all ranks meet in the same order? Run the collectives of every rank without time, each waiting for all members."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

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


def validate_collectives(
    rows: Mapping[int, Sequence[Action]], groups: Groups, alike: Callable[[int], Hashable] | None = None
) -> None:
    """Prove that any two ranks meet their common collectives in the same order, and that no ring of ranks waits.

    A rank meets the groups of its actions one after the other; a meeting ends when all its members are at it. That is
    stricter than asynchronous REDUCEs need, so it holds for backends that may block at any collective.

    Args:
        rows: the actions of every rank; ranks of one stage share one sequence.
        groups: of a rank in an action, each with at least two members.
        alike: equal for ranks of one sequence that meet the same groups in all its actions, so that they are always at
            the same place and one stands for all; None: every rank is a kind of its own.

    Raises:
        ScheduleError: a rank that never meets the others, with the rows of those concerned.
    """
    numbers = _Numbers()
    kind_of: dict[int, Hashable]
    kind_of = {rank: (id(row), rank if alike is None else alike(rank)) for rank, row in rows.items()}
    first: dict[Hashable, int] = {}  # rank of every kind
    for rank, kind in kind_of.items():
        first.setdefault(kind, rank)
    begins = _begins(first.values(), rows, groups)
    meetings = {
        kind: _meetings(rank, rows[rank], begins[id(rows[rank])], groups, numbers) for kind, rank in first.items()
    }
    members = [{kind_of[rank] for rank in group} for group in numbers.groups]
    at = dict.fromkeys(meetings, 0)
    waiting: dict[tuple[Action, int], set[Hashable]] = {}
    ready = list(meetings)
    while ready:
        kind = ready.pop()
        mine = meetings[kind]
        if at[kind] == len(mine):
            continue
        key = mine[at[kind]][1:]
        there = waiting.setdefault(key, set())
        there.add(kind)
        if len(there) == len(members[key[1]]):
            del waiting[key]
            for member in members[key[1]]:
                at[member] += 1
                ready.append(member)
    if any(at[kind] < len(mine) for kind, mine in meetings.items()):
        stuck = {r: meetings[kind][at[kind]] for r, kind in kind_of.items() if at[kind] < len(meetings[kind])}
        raise _error(rows, {rank: (i, (action, numbers.groups[n])) for rank, (i, action, n) in stuck.items()})


def _begins(ranks: Iterable[int], rows: Mapping[int, Sequence[Action]], groups: Groups) -> dict[int, int]:
    """By identity of a sequence, the first action in which some rank that does it meets ranks of other sequences:
    before, all members do the same list, so they cannot but be in order."""
    found: dict[int, int] = {}
    for rank in ranks:
        row = rows[rank]
        for i in range(found.get(id(row), len(row))):
            if any(rows.get(r) is not row for group in groups(rank, row[i]) for r in group):
                found[id(row)] = i
                break
        else:
            found.setdefault(id(row), len(row))
    return found


def _meetings(
    rank: int, row: Sequence[Action], begin: int, groups: Groups, numbers: _Numbers
) -> list[tuple[int, Action, int]]:
    """(index of the action, action, number of the group) of one rank's meetings, from action ``begin`` on."""
    return [(i, row[i], numbers(group)) for i in range(begin, len(row)) for group in groups(rank, row[i])]


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
