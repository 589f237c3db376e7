"""In which order a stage posts its receives."""

from __future__ import annotations

from hetero_megatron.schedule.actions import Action, Schedule


def receive_order(schedule: Schedule, stage: int) -> tuple[Action, ...]:
    """The receives of a stage of a lowered schedule, in an order in which no message overtakes another of its sender.

    Where messages of one pair of ranks queue up (all but gloo's do), they must be posted in the order of their sends.
    That is the order of the stage's own list, except where both activations and gradients come from one stage: two
    stages with several chunks.
    """
    rows, sent = schedule.stages, dict[int, list[Action]]()
    place: dict[Action, tuple[int, int]] = {}  # of a receive: its sender, and how many it sends before
    for action in rows[stage]:
        there = schedule.peer(stage, action) if action.kind in ("RECV_F", "RECV_B") else None
        if there is not None and there[0] not in sent:
            sender = there[0]
            sent[sender] = []
            for send in rows[sender]:
                back = schedule.peer(sender, send) if send.kind in ("SEND_F", "SEND_B") else None
                if back is not None and back[0] == stage:
                    place[back[1]] = sender, len(sent[sender])
                    sent[sender].append(back[1])
    posted = dict.fromkeys(sent, 0)
    order: list[Action] = []
    for action in rows[stage]:
        if action in place:
            sender, number = place[action]
            order += sent[sender][posted[sender] : number + 1]
            posted[sender] = max(posted[sender], number + 1)
    return tuple(order)
