"""Proving a schedule before it runs: complete, ordered, free of deadlock, collectives met in one order; and its grid,
with the place of an error marked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from hetero_megatron.schedule.actions import KINDS, Action, Schedule


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
    last_actions = {name: row[max(first + most, len(row) - last) :] if last else () for name, row in rows.items()}
    ends = {name: [str(Action(*a)) for a in row] for name, row in last_actions.items()}
    width = max((len(cell) for part in (texts, ends) for cells in part.values() for cell in cells), default=1)
    lines = []
    for name, cells in texts.items():
        cells = [cell.ljust(width) for cell in cells]
        if error and error[0] == name:
            cells[error[1] - first] += " <-- ERROR HERE"
        cut = len(rows[name]) > first + most + len(ends[name])
        last_cells = [*(["…"] if cut else []), *(cell.ljust(width) for cell in ends[name])]
        lines.append(f"{name}: {'… ' if first else ''}{' '.join([*cells, *last_cells])}".rstrip())
    return "\n".join(lines)


_RECEIVES = ("RECV_F", "RECV_B")
_NEEDS = {"B": ("F",), "B_INPUT": ("F",), "W": ("B_INPUT",), "SEND_F": ("F",), "SEND_B": ("B", "B_INPUT")}
_EXCLUDES = {"B": ("B_INPUT",), "B_INPUT": ("B",)}


class ScheduleError(ValueError):
    """A schedule that cannot run; the message holds the grid with the place marked."""


def validate(schedule: Schedule) -> None:
    """Run the lowered schedule without time: sends complete at once, receives block until the peer has sent.

    Chunks that follow one another on one stage need no messages: there the later one's forward, and the earlier one's
    backward, come after the other's.

    Raises:
        ScheduleError: an unknown or repeated action, an action before what it needs, a receive without a
            send, a send that nobody receives, a forward without a backward, gradients summed before they are all there
            or never sent back as parameters, or a deadlock.
    """
    _Run(schedule).finish()


class _Run:
    """One execution: how far each stage has come and which messages are under way."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.last = schedule, len(schedule.stages) - 1
        self.position = [0] * len(schedule.stages)
        self.done: list[set[Action]] = [set() for _ in schedule.stages]
        self.synchronising = [""] * len(schedule.stages)  # the last REDUCE, UPDATE or ALL_GATHER of a stage
        self.waiting: dict[tuple[int, Action], int] = {}  # (sending stage, SEND) -> stage that waits for it
        self.unread: set[tuple[int, Action]] = set()
        ready = list(range(len(schedule.stages)))
        while ready:
            ready += self._advance(ready.pop())

    def _advance(self, stage: int) -> list[int]:
        """Run ``stage`` until it blocks or ends; returns the stages that it woke."""
        row, done_actions = self.schedule.stages[stage], self.done[stage]
        woken: list[int] = []
        for index in range(self.position[stage], len(row)):
            action = row[index]
            kind = action[0]
            self.position[stage] = index
            if action in done_actions:
                raise self._error(stage, index, "is there twice")
            if kind in _RECEIVES:
                key = self._sender(stage, index, action)
                if key not in self.unread:
                    self.waiting[key] = stage
                    return woken
                self.unread.remove(key)
            else:
                self._check_order(stage, index, action)
            done_actions.add(action)
            if kind == "SEND_F" or kind == "SEND_B":
                key = (stage, action)
                self.unread.add(key)
                if key in self.waiting:
                    woken.append(self.waiting.pop(key))
        self.position[stage] = len(row)
        return woken

    def _sender(self, stage: int, at: int, action: Action) -> tuple[int, Action]:
        """(stage, SEND) that the receive ``action`` matches."""
        sender = self.schedule.peer(stage, action)
        if sender is None:
            raise self._error(stage, at, "has no stage to receive from")
        return sender

    def _check_order(self, stage: int, at: int, action: Action) -> None:
        """What the action needs has been done before it on this stage."""
        kind, m, c = action
        done_actions = self.done[stage]
        if kind not in KINDS:
            raise self._error(stage, at, f"is of unknown kind (known: {', '.join(KINDS)})")
        needs = _NEEDS.get(kind, ())
        if needs and not any((k, m, c) in done_actions for k in needs):
            raise self._error(stage, at, f"comes before {Action(needs[0], m, c)}")
        if any((k, m, c) in done_actions for k in _EXCLUDES.get(kind, ())):
            raise self._error(stage, at, "repeats a backward that was done in another form")
        if kind in ("F", "B", "B_INPUT"):
            self._check_input(stage, at, action)
        if kind in ("REDUCE", "UPDATE", "ALL_GATHER"):
            self._check_synchronisation(stage, at, action)
        elif self.synchronising[stage]:
            raise self._error(stage, at, f"comes after {self.synchronising[stage]}, which needs all gradients")
        if kind in ("SEND_F", "SEND_B") and self.schedule.peer(stage, action) is None:
            raise self._error(stage, at, "has no stage to send to")

    def _check_input(self, stage: int, at: int, action: Action) -> None:
        """What it works on has been received, or made by another chunk of this stage."""
        kind, m, c = action
        if not 0 <= c < self.schedule.chunks:
            raise self._error(stage, at, f"is of a chunk that is not there (the schedule has {self.schedule.chunks})")
        source = self.schedule.before(stage, c) if kind == "F" else self.schedule.after(stage, c)
        if source is None:
            return
        if source[0] != stage:
            sources: tuple[Action, ...] = (Action("RECV_F" if kind == "F" else "RECV_B", m, c),)
        else:
            sources = tuple(Action(k, m, source[1]) for k in (("F",) if kind == "F" else ("B", "B_INPUT")))
        if not any(x in self.done[stage] for x in sources):
            raise self._error(stage, at, f"comes before {sources[0]}")

    def _check_synchronisation(self, stage: int, at: int, action: Action) -> None:
        """REDUCE hop after hop, then UPDATE once, then ALL_GATHER, the hops the other way round."""
        kind, bucket, hop = action
        done_actions, updated = self.done[stage], ("UPDATE", 0, 0) in self.done[stage]
        self.synchronising[stage] = str(Action(*action))
        if kind == "REDUCE":
            if updated:
                raise self._error(stage, at, "comes after the update")
            if hop and ("REDUCE", bucket, hop - 1) not in done_actions:
                raise self._error(stage, at, f"comes before {Action('REDUCE', bucket, hop - 1)}")
        elif kind == "ALL_GATHER":
            if not updated:
                raise self._error(stage, at, "comes before the update")
            if ("REDUCE", bucket, hop) not in done_actions:
                raise self._error(stage, at, f"without {Action('REDUCE', bucket, hop)}")
            if ("REDUCE", bucket, hop + 1) in done_actions and ("ALL_GATHER", bucket, hop + 1) not in done_actions:
                raise self._error(stage, at, f"comes before {Action('ALL_GATHER', bucket, hop + 1)}")

    def finish(self) -> None:
        """Nobody still waits, no message is unread, every forward has its backward."""
        rows = self.schedule.stages
        blocked = [(s, rows[s][self.position[s]]) for s in range(len(rows)) if self.position[s] < len(rows[s])]
        for stage, action in blocked:
            sender = self._sender(stage, self.position[stage], action)
            if sender[1] not in rows[sender[0]]:
                raise self._error(
                    stage,
                    self.position[stage],
                    f"waits for {sender[1]} of stage {sender[0]}, which is missing",
                )
        if blocked:
            waits = ", ".join(f"stage {s} at {a}" for s, a in blocked[:8])
            raise self._error(blocked[0][0], self.position[blocked[0][0]], f"never ends: deadlock ({waits})")
        for stage, action in sorted(self.unread):
            raise self._error(stage, rows[stage].index(action), "is received by nobody")
        for stage, done_actions in enumerate(self.done):
            for kind, m, c in done_actions:
                action = Action(kind, m, c)
                if kind == "F" and not {("B", m, c), ("B_INPUT", m, c)} & done_actions:
                    raise self._error(stage, rows[stage].index(action), "has no backward")
                if kind == "B_INPUT" and ("W", m, c) not in done_actions:
                    raise self._error(stage, rows[stage].index(action), "has no W")
                if kind == "REDUCE" and ("UPDATE", 0, 0) in done_actions and ("ALL_GATHER", m, c) not in done_actions:
                    raise self._error(stage, rows[stage].index(action), "has no ALL_GATHER")

    def _error(self, stage: int, at: int, what: str) -> ScheduleError:
        action = self.schedule.stages[stage][at]
        return ScheduleError(
            f"stage {stage}: {Action(*action)} {what}\n{format_grid(self.schedule, error=(stage, at))}"
        )


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
    place_of = dict.fromkeys(meetings, 0)
    waiting: dict[tuple[Action, int], set[Hashable]] = {}
    ready = list(meetings)
    while ready:
        kind = ready.pop()
        own_meetings = meetings[kind]
        if place_of[kind] == len(own_meetings):
            continue
        key = own_meetings[place_of[kind]][1:]
        arrived = waiting.setdefault(key, set())
        arrived.add(kind)
        if len(arrived) == len(members[key[1]]):
            del waiting[key]
            for member in members[key[1]]:
                place_of[member] += 1
                ready.append(member)
    if any(place_of[kind] < len(own_meetings) for kind, own_meetings in meetings.items()):
        stuck = {
            r: meetings[kind][place_of[kind]] for r, kind in kind_of.items() if place_of[kind] < len(meetings[kind])
        }
        raise _error(rows, {rank: (i, (action, numbers.groups[n])) for rank, (i, action, n) in stuck.items()})


def _begins(ranks: Iterable[int], rows: Mapping[int, Sequence[Action]], groups: Groups) -> dict[int, int]:
    """By identity of a sequence, the first action in which some rank that does it meets ranks of other sequences:
    before, all members do the same list, so they cannot but be in order."""
    firsts: dict[int, int] = {}
    for rank in ranks:
        row = rows[rank]
        for i in range(firsts.get(id(row), len(row))):
            if any(rows.get(r) is not row for group in groups(rank, row[i]) for r in group):
                firsts[id(row)] = i
                break
        else:
            firsts.setdefault(id(row), len(row))
    return firsts


def _meetings(
    rank: int, row: Sequence[Action], begin: int, groups: Groups, numbers: _Numbers
) -> list[tuple[int, Action, int]]:
    """(index of the action, action, number of the group) of one rank's meetings, from action ``begin`` on."""
    return [(i, row[i], numbers(group)) for i in range(begin, len(row)) for group in groups(rank, row[i])]


def _error(rows: Mapping[int, Sequence[Action]], stuck: Mapping[int, tuple[int, Meeting]]) -> ScheduleError:
    """Marks a rank whose partner waits elsewhere (or is done)."""
    for rank, (i, (action, group)) in sorted(stuck.items()):
        partner = next(r for r in group if r not in stuck or stuck[r][1] != (action, group))
        partner_state = "ended"
        if partner in stuck:
            action_there, group_there = stuck[partner][1]
            partner_state = f"is at {Action(*action_there)} with {_ranks(group_there)}"
        text = (
            f"rank {rank}: {Action(*action)} with {_ranks(group)} never begins: rank {partner} of them {partner_state}"
        )
        shown = [rank, *[r for r in group if r != rank]][:SHOWN]
        labelled = {f"rank {r}": rows[r] for r in sorted(shown) if r in rows}
        return ScheduleError(f"{text}\n{format_rows(labelled, (f'rank {rank}', i))}")
    raise AssertionError("somebody is stuck")


def _ranks(group: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, group[:SHOWN]))}{', …' if len(group) > SHOWN else ''}"
