"""Rates and the cost model of a stage: what wins, what scales, what is refused; agreement with the prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cluster import CHIPS, cluster_from_dict, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plan import plan_from_dict
from hetero_megatron.planner.costs import CostModel, StageChoice
from hetero_megatron.planner.footprint import estimate_memory
from hetero_megatron.planner.network import Network
from hetero_megatron.planner.operators import Operators
from hetero_megatron.planner.predict import predict
from hetero_megatron.planner.rates import as_document, load_rates, model_fingerprint, share_of_peak
from hetero_megatron.spec import load_model
from hetero_megatron.spec.flops import layer_flops, parameter_count
from tests.planner_cases import MODEL, SEQ, chip_rates, cluster, plan, stages

LLAMA = load_model("llama2-7b")


def dgx(chip: str = "A100-80-SXM", nodes: int = 2, **more: Any):  # type: ignore[no-untyped-def]
    return cluster_from_dict(
        {
            "nodes": [{"name": "n", "count": nodes, "chip": chip, "chips_per_node": 8}],
            "links": {"inter_node": {"bandwidth": "200 GB/s", "latency": "10 us"}},
            **more,
        }
    )


def test_every_chip_of_the_catalogue_has_a_cold_start_below_its_peak() -> None:
    for chip in CHIPS.values():
        dtype = "bf16" if "bf16" in chip.dtypes else "fp16"
        rates = load_rates(dgx(chip.name), dtype).chips[chip.name]
        assert 0.3 * chip.flops[dtype] < rates.gemm_flops <= chip.flops[dtype] and not rates.calibrated
        assert 0 < rates.attention_flops < rates.gemm_flops
    assert share_of_peak("A100-80-PCIe") == 0.811 and share_of_peak("A100-80-SXM") == 0.869


def test_layers_cost_more_than_peak_and_less_than_a_third_of_it() -> None:
    model = CostModel(LLAMA, dgx(), 4096)
    for tp in (1, 2, 4, 8):
        stage = StageChoice("A100-80-SXM", tp, 1, 8, False, False)
        ideal = 8 * layer_flops(LLAMA, 4096) / (tp * 312e12)
        forward, backward = model.forward_seconds(stage, 1), model.backward_seconds(stage, 1)
        assert ideal < forward < 6 * ideal and 2 * ideal < backward < 12 * ideal


def test_time_grows_with_work() -> None:
    model = CostModel(LLAMA, dgx(), 2048)
    base = StageChoice("A100-80-SXM", 2, 1, 8, False, False)
    seconds = model.forward_seconds(base, 2)
    for more in (replace(base, layers=9), replace(base, head=True), replace(base, embed=True), replace(base, tp=1)):
        assert model.forward_seconds(more, 2) > seconds
    assert model.forward_seconds(base, 3) > seconds > model.forward_seconds(replace(base, dp=2), 2)
    backward = [model.backward_seconds(replace(base, recompute=r), 2) for r in ("none", "selective", "full")]
    assert backward == sorted(backward)
    assert model.backward_seconds(replace(base, recompute="first", first=3), 2) < backward[2]
    slow = CostModel(LLAMA, dgx(), 2048).tp_link(replace(base, tp=16))  # leaves the node
    assert slow.beta > model.tp_link(replace(base, tp=8)).beta


def test_measured_layers_win_and_scale() -> None:
    model = CostModel(MODEL, cluster(), SEQ, "fp32")
    stage = StageChoice("c0", 1, 1, 5, True, True)
    assert model.forward_seconds(stage, 1) == pytest.approx(5)
    assert model.backward_seconds(stage, 1) == pytest.approx(10)
    # Not measured: twice the rows cost twice as much, as the operators say.
    assert model.forward_seconds(stage, 2) == pytest.approx(10, rel=1e-6)
    other = replace(MODEL, hidden_size=256, head_dim=32)
    assert (
        CostModel(other, cluster(), SEQ, "fp32").forward_seconds(stage, 1) < 1e-3
    )  # rows of another model do not count


def test_correction_between_measured_rows() -> None:
    mark = model_fingerprint(MODEL)
    rows = [[mark, 1, 1, SEQ, 1.0, 2.0], [mark, 1, 4, SEQ, 3.0, 6.0]]
    rates = load_rates(cluster(layers=rows), "fp32").chips["c0"]
    operators = Operators(MODEL, rates, 4)
    assert operators.layer(1.0, 1, SEQ) == (1.0, 2.0) and operators.layer(1.0, 4, SEQ) == (3.0, 6.0)
    between = operators.layer(1.0, 2, SEQ)[0]
    assert 1.0 < between < 3.0


def test_measured_products_and_attention() -> None:
    rates = load_rates(
        cluster(gemm=[[64, 128, 128, 1e-3]], attention=[[64, 8, 16, 1e-3, 2e-3]], layers=[]), "fp32"
    ).chips["c0"]
    operators = Operators(MODEL, rates, 4)
    assert operators.gemm(64, 128, 128) == pytest.approx(1e-3)
    assert operators.gemm(64, 256, 128) == pytest.approx(2e-3)
    assert operators.attention(1.0, 1, 64) == pytest.approx((1e-3, 2e-3))
    assert operators.attention(0.5, 2, 64) == pytest.approx((1e-3, 2e-3))


def test_rates_survive_being_written_and_read() -> None:
    given = chip_rates(1.0, gemm=[[64, 128, 128, 1e-3]])
    rates = load_rates(cluster(gemm=[[64, 128, 128, 1e-3]]), "fp32").chips["c0"]
    document = as_document(rates)
    for key, value in given.items():
        assert document.get(key, 0) == value, key
    again = cluster_from_dict(
        {
            "nodes": [{"name": "a", "chip": "c0"}],
            "chips": {"c0": {"memory": "1 GiB", "dtypes": ["fp32"], "rates": {"fp32": document}}},
        }
    )
    assert load_rates(again, "fp32").chips["c0"] == rates


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gemms": []}, r"rates.chips.c0.fp32 = gemms: unknown rate"),
        ({"gemm": [[1, 2, 3]]}, r"rates.chips.c0.fp32.gemm: rows were expected. Accepted: lists of 4"),
        ({"layers": [["x", 1, 1, 64, -1, 1]]}, r"rates.chips.c0.fp32.layers = -1: not a rate"),
        ({"gemm_flops": "fast"}, r"rates.chips.c0.fp32.gemm_flops = fast: not a rate"),
        ({"bytes_per_second": 0}, r"bytes_per_second = 0: not a rate"),
    ],
)
def test_bad_rates_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_rates(cluster(**change), "fp32")


def test_bad_links_and_chips_are_refused() -> None:
    def with_links(*links: Any):  # type: ignore[no-untyped-def]
        return load_rates(dgx(rates={"links": list(links)}), "bf16")

    with pytest.raises(UserError, match=r"rates.links\[0\].*Accepted: node groups n"):
        with_links({"between": ["n", "m"], "beta": 1e-9})
    with pytest.raises(UserError, match=r"rates.links\[0\]: a link without its rate"):
        with_links({"within": "n", "alpha": 1e-6})
    with pytest.raises(UserError, match=r"rates.links\[0\].collectives = gather.*Accepted: all_to_all, exchange"):
        with_links({"within": "n", "beta": 1e-9, "collectives": {"gather": {"alpha": 1}}})
    with pytest.raises(UserError, match=r"collectives.exchange.beta = fast: not a rate"):
        with_links({"within": "n", "beta": 1e-9, "collectives": {"exchange": {"beta": "fast"}}})
    with pytest.raises(UserError, match=r"no node has this chip"):
        load_rates(dgx(rates={"chips": {"H100-SXM": {}}}), "bf16")
    with pytest.raises(UserError, match=r"dtype = fp8"):
        CostModel(LLAMA, dgx(), 2048, "fp8")
    model = CostModel(LLAMA, dgx("V100-32-SXM2"), 2048)
    with pytest.raises(UserError, match=r"does not compute in bf16.*fp32, fp16"):
        model.forward_seconds(StageChoice("V100-32-SXM2", 1, 1, 1, False, False), 1)


def test_links_by_direction_and_by_pair() -> None:
    file = {
        "nodes": [{"name": "a", "chip": "L4"}, {"name": "b", "chip": "L4"}],
        "links": {"inter_node": {"bandwidth": "1 GB/s"}, "pairs": [{"between": ["a", "b"], "bandwidth": "2 GB/s"}]},
    }
    cold = load_rates(cluster_from_dict(file), "bf16")
    assert cold.link(0, 1).beta == cold.link(1, 0).beta == pytest.approx(1 / (0.8 * 2e9))
    file["rates"] = {"links": [{"between": ["a", "b"], "beta": 1e-9}, {"from": "b", "to": "a", "beta": 3e-9}]}
    measured = load_rates(cluster_from_dict(file), "bf16")
    assert (measured.link(0, 1).beta, measured.link(1, 0).beta) == (1e-9, 3e-9)


def test_exchanges_of_tensor_parallel_groups_cost_what_was_measured_of_them() -> None:
    """``exchange`` was measured between two ranks, posting included; a message is posted for every further one."""
    way = {"within": "n", "alpha": 1.0, "beta": 1.0, "message_seconds": 0.5}
    for measured, seconds, posted in (
        ({"exchange": {"alpha": 0.1, "beta": 1e-6}, "all_to_all": {"alpha": 7.0, "beta": 7.0}}, (0.1, 1e-6), 1),
        ({"all_to_all": {"alpha": 0.2, "beta": 2e-6}}, (0.2, 2e-6), 0),
        ({}, (1.0, 1.0), 0),
    ):
        model = CostModel(LLAMA, dgx(rates={"links": [{**way, "collectives": measured}]}), 2048)
        size = 2048 * LLAMA.hidden_size * 2
        for tp in (2, 4):
            expected = seconds[0] + seconds[1] * size * (tp - 1) / tp + 0.5 * (tp - 1 - posted)
            link = model.tp_link(StageChoice("A100-80-SXM", tp, 1, 1, False, False))
            assert model.tp_exchange_seconds(tp, 1, link) == pytest.approx(expected)
            found, posting = Network(model.rates).tp_exchange(tuple(range(tp)), size)
            assert found == pytest.approx(expected) and posting == 0.5 * (tp - 1)


def test_actions_of_tensor_parallel_stages_have_fixed_seconds_of_their_own() -> None:
    for own, more in ((0.0, 0.0), (0.75, 0.5)):
        where = cluster(nodes=1, per_node=2, action_seconds=0.25, tp_action_seconds=own)
        model = CostModel(MODEL, where, SEQ, "fp32")
        bare = CostModel(MODEL, cluster(nodes=1, per_node=2), SEQ, "fp32")
        for tp in (1, 2):
            stage = StageChoice("c0", tp, 1, 1, False, False)
            extra = 0.25 + (more if tp == 2 else 0.0)
            assert model.forward_seconds(stage, 1) == pytest.approx(bare.forward_seconds(stage, 1) + extra)


def test_the_choice_and_the_plan_cost_the_same() -> None:
    """Closed form and prediction: same stage seconds, same memory, for an equal split on one kind of chip."""
    where = dgx(nodes=2)
    spelled = plan_from_dict(
        {
            "seq_length": 2048, "global_batch_size": 8,
            "pipelines": [{"micro_batch_size": 1, "num_micro_batches": 8, "stages": stages(12, 20, tp=8)}],
        },
        LLAMA,
    )  # fmt: skip
    model = CostModel(LLAMA, where, 2048)
    found = predict(spelled, LLAMA, where, costs=model)
    choices = [StageChoice("A100-80-SXM", 8, 1, n, n == 12, n == 20) for n in (12, 20)]
    for s, choice in enumerate(choices):
        both = model.forward_seconds(choice, 1) + model.backward_seconds(choice, 1)
        assert found.timelines[0].busy[s] == pytest.approx(8 * both, rel=1e-9)
        needs = model.memory_bytes(choice, 1, 2 - s, 1)
        got = found.memory[8 * s]
        for part in ("weights", "gradients", "optimizer", "activations", "overhead"):
            assert getattr(got, part) == pytest.approx(getattr(needs, part), rel=2e-3), part
    link = model.rates.between("n", "n").as_link()
    size = 2048 * LLAMA.hidden_size * 2
    assert model.boundary_seconds(*choices, 1, link) == pytest.approx(link.latency + size / link.bandwidth)


def test_memory_follows_the_choice() -> None:
    model = CostModel(LLAMA, dgx(), 2048)
    base = StageChoice("A100-80-SXM", 1, 1, 32, True, True)
    whole = model.memory_bytes(base, 1, 1, 1)
    count = parameter_count(LLAMA)
    assert (whole.weights, whole.gradients, whole.optimizer) == (2 * count, 4 * count, 12 * count)
    assert model.memory_bytes(base, 1, 1, 4).optimizer == pytest.approx(3 * count, abs=8)
    assert model.memory_bytes(replace(base, offload=True), 1, 1, 1).optimizer == 0
    many = [model.memory_bytes(replace(base, recompute=r), 1, 8, 1).activations for r in ("none", "selective", "full")]
    assert many == sorted(many, reverse=True)
    assert model.memory_limit("A100-80-SXM") < 80 * 2**30


def test_the_optimizer_shrinks_with_replicas() -> None:
    model = CostModel(LLAMA, dgx(), 2048)
    stage = StageChoice("A100-80-SXM", 8, 1, 32, True, True)
    assert model.optimizer_seconds(stage, 1) > model.optimizer_seconds(stage, 4)


def test_estimates_without_a_cluster_have_no_overhead() -> None:
    spelled = plan_from_dict(plan((2, stages(6, 5))), MODEL)
    assert all(m.overhead == 0 for m in estimate_memory(spelled, MODEL, "fp32").values())


@pytest.mark.parametrize("file", sorted(Path("examples/clusters/papers").glob("*.yaml")), ids=lambda f: f.stem)
def test_clusters_of_papers_say_what_is_published_and_have_rates(file: Path) -> None:
    text = file.read_text()
    assert "Published" in text and "Assumed" in text
    found = load_cluster(file)
    dtype = "fp32" if "sailor" in file.stem else "bf16"
    rates = load_rates(found, dtype)
    assert set(rates.chips) == set(found.chips)
    groups = [g.name for g in found.nodes]
    assert all(rates.between(a, b).beta > 0 and rates.between(a, a, True).beta > 0 for a in groups for b in groups)
