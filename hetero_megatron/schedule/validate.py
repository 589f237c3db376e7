"""Proving a schedule before it runs: complete, ordered, free of deadlock."""

from __future__ import annotations

from hetero_megatron.schedule.actions import KINDS, Action, Schedule
from hetero_megatron.schedule.show import format_grid

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
        row, done = self.schedule.stages[stage], self.done[stage]
        woken: list[int] = []
        for at in range(self.position[stage], len(row)):
            action = row[at]
            kind = action[0]
            self.position[stage] = at
            if action in done:
                raise self._error(stage, at, "is there twice")
            if kind in _RECEIVES:
                key = self._sender(stage, at, action)
                if key not in self.unread:
                    self.waiting[key] = stage
                    return woken
                self.unread.remove(key)
            else:
                self._check_order(stage, at, action)
            done.add(action)
            if kind == "SEND_F" or kind == "SEND_B":
                key = (stage, action)
                self.unread.add(key)
                if key in self.waiting:
                    woken.append(self.waiting.pop(key))
        self.position[stage] = len(row)
        return woken

    def _sender(self, stage: int, at: int, action: Action) -> tuple[int, Action]:
        """(stage, SEND) that the receive ``action`` matches."""
        there = self.schedule.peer(stage, action)
        if there is None:
            raise self._error(stage, at, "has no stage to receive from")
        return there

    def _check_order(self, stage: int, at: int, action: Action) -> None:
        """What the action needs has been done before it on this stage."""
        kind, m, c = action
        done = self.done[stage]
        if kind not in KINDS:
            raise self._error(stage, at, f"is of unknown kind (known: {', '.join(KINDS)})")
        needs = _NEEDS.get(kind, ())
        if needs and not any((k, m, c) in done for k in needs):
            raise self._error(stage, at, f"comes before {Action(needs[0], m, c)}")
        if any((k, m, c) in done for k in _EXCLUDES.get(kind, ())):
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
        there = self.schedule.before(stage, c) if kind == "F" else self.schedule.after(stage, c)
        if there is None:
            return
        if there[0] != stage:
            made: tuple[Action, ...] = (Action("RECV_F" if kind == "F" else "RECV_B", m, c),)
        else:
            made = tuple(Action(k, m, there[1]) for k in (("F",) if kind == "F" else ("B", "B_INPUT")))
        if not any(x in self.done[stage] for x in made):
            raise self._error(stage, at, f"comes before {made[0]}")

    def _check_synchronisation(self, stage: int, at: int, action: Action) -> None:
        """REDUCE hop after hop, then UPDATE once, then ALL_GATHER, the hops the other way round."""
        kind, bucket, hop = action
        done, updated = self.done[stage], ("UPDATE", 0, 0) in self.done[stage]
        self.synchronising[stage] = str(Action(*action))
        if kind == "REDUCE":
            if updated:
                raise self._error(stage, at, "comes after the update")
            if hop and ("REDUCE", bucket, hop - 1) not in done:
                raise self._error(stage, at, f"comes before {Action('REDUCE', bucket, hop - 1)}")
        elif kind == "ALL_GATHER":
            if not updated:
                raise self._error(stage, at, "comes before the update")
            if ("REDUCE", bucket, hop) not in done:
                raise self._error(stage, at, f"without {Action('REDUCE', bucket, hop)}")
            if ("REDUCE", bucket, hop + 1) in done and ("ALL_GATHER", bucket, hop + 1) not in done:
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
        for stage, done in enumerate(self.done):
            for kind, m, c in done:
                action = Action(kind, m, c)
                if kind == "F" and not {("B", m, c), ("B_INPUT", m, c)} & done:
                    raise self._error(stage, rows[stage].index(action), "has no backward")
                if kind == "B_INPUT" and ("W", m, c) not in done:
                    raise self._error(stage, rows[stage].index(action), "has no W")
                if kind == "REDUCE" and ("UPDATE", 0, 0) in done and ("ALL_GATHER", m, c) not in done:
                    raise self._error(stage, rows[stage].index(action), "has no ALL_GATHER")

    def _error(self, stage: int, at: int, what: str) -> ScheduleError:
        action = self.schedule.stages[stage][at]
        return ScheduleError(
            f"stage {stage}: {Action(*action)} {what}\n{format_grid(self.schedule, error=(stage, at))}"
        )
