"""Which hosts may join an elastic job, and what the others are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from hetero_megatron.comm.epochs import EpochStore, JoinRequest, Speed
from hetero_megatron.launch.admission import Admission
from hetero_megatron.training.agreement import program_facts

CLUSTER = "nodes:\n  - {name: a, chip: A100-80-SXM}\n  - {name: b, chip: A100-80-SXM, chips_per_node: 2}\n"
LARGER = CLUSTER + "  - {name: c, chip: A100-80-SXM}\n"
RENAMED = LARGER.replace("name: b", "name: q")


@pytest.fixture(scope="module")
def program() -> dict[str, str]:
    return program_facts()


def ask(directory: Path, request: JoinRequest, present: set[str], cluster: str = "") -> tuple[str, Admission]:
    """(what the host is told, the launcher's side)."""
    file = directory / "cluster.yaml"
    file.write_text(cluster)
    store = EpochStore(dist.HashStore(), b"")
    admission = Admission(store, 3, 0.5, directory)
    number = store.ask_to_join(request)
    assert len(admission.look(present, file if cluster else None)) == 1
    answer = store.join_answer(number)
    assert answer is not None and bool(answer.refused) == (not answer.members)
    assert admission.waiting == answer.members
    return answer.refused, admission


def test_what_is_refused(program: dict[str, str], tmp_path: Path) -> None:
    name = next(iter(program))
    cases = [
        (JoinRequest("x", "a", 1, "", program), {"a"}, "", "a node of this name is in the job already"),
        (JoinRequest("x", "z", 1, "", program | {name: "0"}), {"a"}, "", f"{name}: this host has 0"),
        (JoinRequest("x", "z", 1, "", {}), {"a"}, "", f"{name}: this host has None"),
        (JoinRequest("x", "c", 1, "", program), {"a", "b"}, CLUSTER, "the job's cluster file gives c 0 chips"),
        (JoinRequest("x", "b", 1, "", program), {"a"}, CLUSTER, "the job's cluster file gives b 2 chips"),
        (JoinRequest("x", "c", 2, LARGER, program), {"a", "b"}, CLUSTER, "its cluster file gives c 1 chip"),
        (JoinRequest("x", "c", 1, RENAMED, program), {"a", "b"}, CLUSTER, "does not have the chips of b"),
        (JoinRequest("x", "c", 1, "nodes: [", program), {"a", "b"}, CLUSTER, "cluster-with-0.yaml"),
        (JoinRequest("x", "c", 1, LARGER, program), {"a"}, "", "the job has no cluster file"),
    ]
    for request, present, cluster, said in cases:
        refused, _ = ask(tmp_path, request, present, cluster)
        assert said in refused and "\n" not in refused, (said, refused)


def test_who_is_admitted(program: dict[str, str], tmp_path: Path) -> None:
    for request, cluster in [
        (JoinRequest("x", "z", 2, "", program), ""),
        (JoinRequest("x", "b", 2, "", program), CLUSTER),
        (JoinRequest("x", "c", 1, LARGER, program), CLUSTER),
    ]:
        refused, admission = ask(tmp_path, request, {"a"}, cluster)
        assert refused == "" and [s.node for s in admission.seats.values()] == [request.node] * request.chips
        assert (admission.cluster_with({request.node}) is None) == (not request.cluster)


def test_hosts_that_the_first_epoch_begins_with(program: dict[str, str], tmp_path: Path) -> None:
    store = EpochStore(dist.HashStore(), b"")
    admission = Admission(store, 3, 0.5, tmp_path, {"b": [1, 2]})
    other = dict.fromkeys(program, "0")
    cases = [
        (JoinRequest("1", "b", 1, "", program), "it has 1 chip, and is to run 2 ranks", [], 3),
        (JoinRequest("2", "b", 2, "", other), "this host has 0, the job", [], 3),
        (JoinRequest("3", "b", 2, "", program), "", [1, 2], 3),
        (JoinRequest("4", "b", 2, "", program), "a node of this name is in the job already", [], 0),
        (JoinRequest("5", "c", 1, "", program), "", [3], 0),
    ]
    for request, refused, members, ranks in cases:
        number = store.ask_to_join(request)
        assert len(admission.look({"a", "b"}, None)) == (members != [1, 2])
        answer = store.join_answer(number)
        assert answer is not None and refused in answer.refused and bool(refused) == bool(answer.refused), request
        assert (answer.members, answer.ranks) == (members, ranks), request
    assert admission.unfit and not admission.awaited and admission.waiting == [3]


def test_two_that_ask_at_once_have_numbers_of_their_own() -> None:
    store = EpochStore(dist.HashStore(), b"secret")
    one, two = (JoinRequest(token, "z", 1, "", {}) for token in "xy")
    assert [store.ask_to_join(one), store.ask_to_join(two)] == [0, 1]
    assert [store.join_request(n) for n in range(3)] == [one, two, None]


def test_a_slow_device_is_left_out(program: dict[str, str], tmp_path: Path) -> None:
    for kind, flops, joins in [("gpu", 60.0, True), ("gpu", 40.0, False), ("other", 1.0, True)]:
        store = EpochStore(dist.HashStore(), b"")
        admission = Admission(store, 3, 0.5, tmp_path)
        for member, theirs in enumerate((90.0, 100.0, 1000.0)):
            store.ready(member, Speed("gpu", theirs))
        store.ask_to_join(JoinRequest("x", "z", 2, "", program))
        admission.look({"a"}, None)
        store.ready(3, Speed("gpu", 100.0))
        assert admission.ready() == []  # one of its two processes is not there yet
        store.ready(4, Speed(kind, flops))
        said = admission.leave_out_slow([0, 1, 2])
        assert bool(said) != joins and (admission.ready() == [3, 4]) == joins
        assert ("40 FLOP/s where 3 of the job compute 100" in store.refused(3)) != joins
