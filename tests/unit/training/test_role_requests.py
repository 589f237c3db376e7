"""What ranks that train ask of a teacher or reference on ranks of its own, and what its ranks answer together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_megatron.comm.group import Refusal
from hetero_megatron.errors import UserError
from hetero_megatron.training.role_client import Lookahead, requests
from hetero_megatron.training.role_messages import Answer, BatchRequest, joint_answer


def run_of(steps: int, interval: int, iterations: int, stop: int | None = None) -> list[BatchRequest]:
    """The batches of a run of samples that begins at step 1 and grows its batch, in the order of the training loop."""
    made, consumed, step, last = list[BatchRequest](), 4, 1, False
    while not last:
        size = 4 if consumed < 16 else 8
        made.append(BatchRequest("train", consumed, size))
        step, consumed = step + 1, consumed + size
        last = step in (steps, stop)
        if step % interval == 0 and not last:
            made += [BatchRequest("valid", 8 * i, 8) for i in range(iterations)]
    ends = ["valid", "test"] if step == steps else ["valid"]
    return made + [BatchRequest(split, 8 * i, 8) for split in ends for i in range(iterations)]


def test_the_teacher_is_asked_for_the_batch_after_each_one() -> None:
    """Also over evaluations and batches that grow; of a run that stops early, once its last evaluation has begun."""
    growing = SimpleNamespace(at=lambda consumed: 4 if consumed < 16 else 8)
    for steps, interval, iterations in ((7, 2, 3), (6, 3, 1), (5, 100, 2), (9, 1, 0)):
        evaluation = SimpleNamespace(interval=interval, iterations=iterations)
        config: Any = SimpleNamespace(
            evaluation=evaluation, plan=SimpleNamespace(global_batch_size=8), skip_train=False, steps=steps,
            batch_size=growing,
        )  # fmt: skip
        for stop in (None, 3, 4):
            batches = run_of(steps, interval, iterations, stop)
            lookahead, missed = Lookahead(requests(config, 1, 4, True)), []
            for number, request in enumerate(batches):
                if lookahead.next != request:
                    missed.append(number)
                lookahead.pass_by(request)
            first_of_end = len(batches) - iterations * (2 if stop is None else 1)
            assert missed in ([], [first_of_end]) and (stop is not None or not missed), (steps, stop, missed)
            assert stop is not None or lookahead.next is None


def test_unlike_data_and_problems_of_any_rank_are_everyone_s() -> None:
    problem = Refusal.of(UserError("it is not there", field="--teacher-hf"))
    data = {"data (train)": "a"}
    alike, other = Answer(data=data), Answer(data={"data (train)": "b"})
    assert joint_answer((3, 4), (alike, alike)) == alike
    found = joint_answer((3, 4), (alike, other)).problem
    assert found is not None
    with pytest.raises(UserError, match="rank 4 reads b, rank 3 reads a"):
        raise found.error()
    assert joint_answer((3, 4), (alike, Answer(problem, stop="asked"))) == Answer(
        problem, "asked (rank 4, with another role)", data
    )
