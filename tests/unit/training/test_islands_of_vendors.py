"""Islands from what ranks say of themselves: routes, refusals, notices."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.comm.islands import BRIDGE, Endpoint, Islands
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.spec import load_model
from hetero_megatron.training.rank_platform import check_chips, communicators, describe_islands, plan_for

NVIDIA = Endpoint("nvidia", "NVIDIA", "NVIDIA A100-SXM4-80GB", "nccl", "", "cpu:gloo,cuda:nccl", ("flagcx",), "2.13.0")
AMD = Endpoint("amd", "AMD", "AMD Instinct MI300X", "nccl", "", "cpu:gloo,cuda:nccl", ("ucc", "flagcx"), "2.13.0")
ASCEND = Endpoint("ascend", "Huawei", "Ascend910B2", "hccl", "", "cpu:gloo,npu:hccl", (), "2.13.0")
CPU = Endpoint("cpu", "any", "x86_64", "gloo", "", "gloo", (), "2.13.0")
OTHER_CPU = Endpoint("arm", "somebody", "aarch64", "gloo", "", "gloo", (), "2.13.0")


def changed(endpoint: Endpoint, **fields: Any) -> Endpoint:
    return Endpoint(**{**vars(endpoint), **fields})


def one_stage(*ranks: int, **more: Any) -> dict[str, Any]:
    return {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [{"ranks": list(ranks), "layers": [0, 6], **more}]}


def plan(*pipelines: dict[str, Any], **more: Any) -> Plan:
    data = {"seq_length": 16, "global_batch_size": len(pipelines), "pipelines": list(pipelines), **more}
    return plan_from_dict(data, load_model("tiny"))


def test_vendors_with_one_name_for_their_library_are_islands_of_their_own() -> None:
    islands = Islands([NVIDIA, AMD, NVIDIA, AMD, ASCEND])
    assert islands.members == ((0, 2), (1, 3), (4,))
    assert str(islands.route((0, 2))) == "nccl" and not islands.crossed((1, 3))
    assert islands.route((0, 1, 3)).direct == "flagcx"
    assert islands.route((0, 4)).bridged and islands.route((0, 1, 4)).bridged


def test_gloo_reaches_every_vendor() -> None:
    assert Islands([CPU, OTHER_CPU]).members == ((0, 1),)


def test_one_library_that_was_started_twice_is_two_islands() -> None:
    first, second = (changed(ASCEND, reach=reach) for reach in ("0,1", "2"))
    assert Islands([first, first, second]).members == ((0, 1), (2,))


def test_the_bridge_can_be_forced_by_all_ranks_alike() -> None:
    forced = [changed(e, transport=BRIDGE) for e in (NVIDIA, AMD)]
    assert Islands(forced).route((0, 1)).bridged
    with pytest.raises(UserError, match="rank 1 says auto, rank 0 says bridge"):
        Islands([forced[0], AMD])


def test_the_table_names_islands_and_how_they_communicate() -> None:
    text = str(Islands([NVIDIA, NVIDIA, AMD, ASCEND]))
    assert "island 0: ranks 0-1, nvidia (NVIDIA; NVIDIA A100-SXM4-80GB), nccl" in text
    assert "island 0 with 1: flagcx, direct" in text and "island 1 with 2: bridge" in text
    assert describe_islands(Islands([CPU, CPU])) == []


def test_unlike_versions_of_torch_are_told() -> None:
    (line,) = describe_islands(Islands([CPU, changed(CPU, torch="2.11.0"), CPU]))
    assert "2.13.0 on ranks 0,2, 2.11.0 on ranks 1" in line


def test_groups_of_layers_stay_in_an_island_unless_the_plan_says_so() -> None:
    islands = Islands([NVIDIA, ASCEND, NVIDIA, CPU])
    crossing = plan(one_stage(0, 1, tp=2), one_stage(2), one_stage(3))
    with pytest.raises(UserError, match=r"ranks 0-1 are one .*rank 0 \(nvidia\) and rank 1 \(ascend\)"):
        plan_for(crossing, islands)
    allowed = plan(one_stage(0, 1, tp=2), one_stage(2), one_stage(3), allow_bridge=True)
    assert plan_for(allowed, islands).islands == ((0, 2), (1,), (3,))
    assert plan_for(allowed, islands).fingerprint() == allowed.fingerprint()


def test_islands_of_the_plan_are_kept_and_divided() -> None:
    near = plan(*(one_stage(r) for r in range(4)), islands=["0,1,2", "3"])
    assert plan_for(near, Islands([NVIDIA, ASCEND, NVIDIA, NVIDIA])).islands == ((0, 2), (1,), (3,))
    assert plan_for(near, Islands([CPU] * 4)) is near


def cluster(*chips: str) -> Any:
    nodes = [{"name": f"n{i}", "count": 1, "chip": chip} for i, chip in enumerate(chips)]
    return cluster_from_dict({"nodes": nodes})


@pytest.mark.parametrize(
    ("chip", "endpoint", "fits"),
    [
        ("A100-80-SXM", NVIDIA, True), ("A100-40-SXM", NVIDIA, True), ("H100-SXM", NVIDIA, False),
        ("MI300X", AMD, True), ("MI210", AMD, False), ("A100-80-PCIe", CPU, True), ("A100-80-SXM", AMD, False),
    ],
)  # fmt: skip
def test_the_driver_s_chip_is_compared_with_the_cluster_file(chip: str, endpoint: Endpoint, fits: bool) -> None:
    one = plan(one_stage(0))
    if fits:
        check_chips(one, cluster(chip), Islands([endpoint]))
    else:
        with pytest.raises(UserError, match=f"rank 0 is to be a {chip}, and its driver says {endpoint.chip}"):
            check_chips(one, cluster(chip), Islands([endpoint]))


def test_many_communicators_are_told() -> None:
    groups = [(0, r) for r in range(1, 40)]
    assert "rank 0 has 39 communicators" in communicators(Islands([NVIDIA] * 40), groups)[0]
    assert communicators(Islands([NVIDIA] * 40), groups[:30]) == communicators(Islands([CPU] * 40), groups) == []


def test_direct_backends_that_only_some_ranks_of_a_vendor_have_are_refused_and_named() -> None:
    """The others would wait for them in groups of another kind. Without other islands nobody goes by them."""
    without = changed(NVIDIA, direct=())
    Islands([NVIDIA, without])
    Islands([changed(one, transport=BRIDGE) for one in (NVIDIA, without, AMD)])
    with pytest.raises(UserError) as refused:
        Islands([NVIDIA, without, AMD])
    assert "unlike direct backends: flagcx on ranks 0, none on ranks 1" in str(refused.value)
    assert "--transport bridge" in str(refused.value)


def test_unlike_versions_of_a_library_are_refused_and_named() -> None:
    """Within an island: who does not talk by the library may have any."""
    old, new = changed(NVIDIA, library_version="2.26.2"), changed(NVIDIA, library_version="2.27.5")
    Islands([old, old, changed(AMD, library_version="2.22.3"), CPU])
    with pytest.raises(UserError) as refused:
        Islands([old, new, changed(AMD, library_version="2.22.3"), old])
    assert "unlike versions of nccl: 2.26.2 on ranks 0,3, 2.27.5 on ranks 1" in str(refused.value)


def test_two_ranks_on_one_device_are_refused() -> None:
    one, other = (changed(NVIDIA, identity=f"GPU-7 of {host}") for host in ("here", "there"))
    with pytest.raises(UserError, match="ranks 0 and 2 would share the device GPU-7 of here"):
        Islands([one, other, one])
