"""Rates and the cost model of a stage: what wins, what scales, what is refused; agreement with the prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import CHIPS, cluster_from_dict, load_cluster
from hetero_megatron.cluster.dump import document
from hetero_megatron.cluster.subset import with_more
from hetero_megatron.errors import UserError
from hetero_megatron.ops import SPECS
from hetero_megatron.ops.spec import Cost
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.predictor.cost.cost_options import CostOptions, StageChoice, share_of_peak
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.link_model import LinkModel
from hetero_megatron.predictor.cost.modelled_operators import ATTENTION_BACKWARD, UPDATE_BYTES
from hetero_megatron.predictor.cost.operator_cost import Operators
from hetero_megatron.predictor.cost.rates import load_rates, model_fingerprint
from hetero_megatron.predictor.cost.rates_document import as_document
from hetero_megatron.predictor.report.prediction import format_prediction
from hetero_megatron.predictor.simulate.step import StepSimulator, predict
from hetero_megatron.spec import load_model
from hetero_megatron.spec.flops import (
    head_flops,
    layer_attention_flops,
    layer_flops,
    layer_matmul_flops,
    parameter_count,
    visible_pairs,
)
from tests.support.planner_cases import MODEL, SEQ, chip_rates, cluster, plan, stages
from tests.support.refusals import refused

LLAMA = load_model("llama2-7b")


def dgx(chip: str = "A100-80-SXM", nodes: int = 2, **more: Any):  # type: ignore[no-untyped-def]
    return cluster_from_dict(
        {
            "nodes": [{"name": "n", "count": nodes, "chip": chip, "chips_per_node": 8}],
            "links": {"inter_node": {"bandwidth": "200 GB/s", "latency": "10 us"}},
            **more,
        }
    )


@pytest.mark.parametrize("name", ["tiny", "llama2-7b"])
@pytest.mark.parametrize("length", [64, 512])
def test_the_planner_and_the_operators_count_the_same_work(name: str, length: int) -> None:
    """``spec/flops.py`` may not import torch, so FLOPs and bytes are written twice: here they are held together."""
    model = load_model(name)
    hidden, vocabulary, heads, wide = model.hidden_size, model.vocab_size, model.num_heads, model.head_dim

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def gemm(n: int, k: int) -> Cost:
        return SPECS["gemm"].forward_cost(meta(length, k), meta(n, k), None)

    q, kv, ffn = heads * wide, model.num_kv_heads * wide, model.ffn_hidden_size
    gates = 2 if model.activation == "swiglu" else 1
    products = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), *[(ffn, hidden)] * gates, (hidden, ffn)]
    assert sum(gemm(*shape).flops for shape in products) == length * layer_matmul_flops(model)
    attention = [meta(1, length, n, wide) for n in (heads, model.num_kv_heads, model.num_kv_heads)]
    pairs = layer_attention_flops(model, visible_pairs(length))
    cost = SPECS["attention"].forward_cost(*attention, None, None, None, 0, 0, None)
    assert cost.flops == pytest.approx(pairs, rel=1.01 / length), "the operator counts half of the diagonal"
    back = SPECS["attention"].backward_flops
    assert (back, SPECS["gemm"].backward_flops) == (ATTENTION_BACKWARD, 2)
    x, w, labels = meta(length, hidden), meta(vocabulary, hidden), meta(length, dtype=torch.int64)
    assert gemm(vocabulary, hidden).flops == head_flops(model, length)
    assert SPECS["linear_cross_entropy"].forward_cost(x, w, labels).flops == head_flops(model, length)
    rates = replace(load_rates(dgx(), "bf16").chips["A100-80-SXM"], gemm_flops=1e30, bytes_per_second=1.0)
    assert Operators(model, rates, 2).gemm(length, ffn, hidden) == gemm(ffn, hidden).bytes
    one = [meta(1000, dtype=torch.float32)]
    update = SPECS["adamw"].forward_cost(one, one, one, one, [], 1, 1e-3, 0.9, 0.95, 1e-8, 0.1)
    assert update.bytes == 1000 * UPDATE_BYTES


def test_every_chip_of_the_catalogue_has_a_cold_start_below_its_peak() -> None:
    for chip in CHIPS.values():
        for dtype in chip.dtypes:
            if dtype not in chip.flops:
                with pytest.raises(UserError, match=f"{chip.name}.tflops: nothing says how fast .* in {dtype}"):
                    load_rates(dgx(chip.name), dtype)
                continue
            rates = load_rates(dgx(chip.name), dtype).chips[chip.name]
            assert 0.28 * chip.flops[dtype] < rates.gemm_flops <= chip.flops[dtype] and not rates.calibrated
            assert 0 < rates.attention_flops < rates.gemm_flops
    shares = {(chip, dtype): share_of_peak(chip, dtype).value for chip in ("A100-80-PCIe", "A100-80-SXM", "A10G", "A10",
              "L40S", "L4", "H20") for dtype in ("bf16", "fp32")}  # fmt: skip
    assert shares == {
        ("A100-80-PCIe", "bf16"): 0.811, ("A100-80-PCIe", "fp32"): 0.811, ("A100-80-SXM", "bf16"): 0.869,
        ("A100-80-SXM", "fp32"): 0.869, ("A10G", "bf16"): 0.99, ("A10G", "fp32"): 0.6,
        ("A10", "bf16"): pytest.approx(4.1 * 150 / 125 / 8),
        ("A10", "fp32"): pytest.approx(0.7 * 150 / 31.2 / 8), ("L40S", "bf16"): 0.75, ("L40S", "fp32"): 0.58,
        ("L4", "bf16"): 0.46, ("L4", "fp32"): 0.33, ("H20", "bf16"): 0.75, ("H20", "fp32"): 0.84,
    }  # fmt: skip


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
    for tp in (1, 2):  # without a gather, elementwise results cost little
        alone = replace(base, tp=tp)
        none, again, full = (
            model.backward_seconds(replace(alone, recompute=r), 2) for r in ("none", "elementwise", "full")
        )
        assert none < again < none + (0.25 if tp > 1 else 0.1) * (full - none)
    slow = CostModel(LLAMA, dgx(), 2048).tp_link(dgx().nodes[0], 16)  # leaves the node
    assert slow.beta > model.tp_link(dgx().nodes[0], 8).beta


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


def test_measured_parts_of_a_backward_win_and_scale() -> None:
    """In stage costs, at sizes that were not measured, and in a prediction, which says where they are missing."""
    mark = model_fingerprint(MODEL)
    split = {"split_layers": [[mark, 1, 1, SEQ, 1.5, 0.75]], "split_head": [[mark, 1, 1, SEQ, 0.5, 0.25]]}
    head = [[mark, 1, 1, SEQ, 0.25, 0.5]]
    measured, plain = cluster(head=head, split_seconds=0.125, **split), cluster(head=head)
    spelled = plan_from_dict(plan((4, stages(5, 6)), schedule="zero-bubble"), MODEL)
    found, before = (predict(spelled, MODEL, where, "fp32") for where in (measured, plain))
    for s, (layers, last) in enumerate(((5, 0), (6, 1))):
        took = {t.action.kind: t.end - t.start for t in found.timelines[0].stages[s]}
        assert took["B_INPUT"] == pytest.approx(1.5 * layers + 0.5 * last)
        assert took["W"] == pytest.approx(0.75 * layers + 0.25 * last + 0.125)
        was = {t.action.kind: t.end - t.start for t in before.timelines[0].stages[s]}
        assert was["B_INPUT"] + was["W"] == pytest.approx(2.0 * layers + 0.5 * last) and was["W"] > 0.4 * layers
    assert found.unsplit == () and before.unsplit == ("c0",)
    assert "share of a backward's FLOPs" in format_prediction(before) and "FLOPs" not in format_prediction(found)
    assert predict(replace(spelled, schedule="1f1b"), MODEL, plain, "fp32").unsplit == ()
    operators = CostModel(MODEL, measured, SEQ, "fp32").operators("c0")
    assert operators.split_layer(1.0, 2, SEQ) == pytest.approx((3.0, 1.5), rel=1e-3)


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
    written = as_document(rates)
    for key, value in given.items():
        assert written.get(key, 0) == value, key
    again = cluster_from_dict(
        {
            "nodes": [{"name": "a", "chip": "c0"}],
            "chips": {"c0": {"memory": "1 GiB", "dtypes": ["fp32"], "rates": {"fp32": written}}},
        }
    )
    assert load_rates(again, "fp32").chips["c0"] == rates


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gemms": []}, r"rates.chips.c0.fp32.gemms: unknown key"),
        ({"gemm": [[1, 2, 3]]}, r"rates.chips.c0.fp32.gemm\[0\] = .*Accepted: lists of 4"),
        ({"layers": [["x", 1, 1, 64, -1, 1]]}, r"rates.chips.c0.fp32.layers\[0\]\[4\] = -1"),
        ({"gemm_flops": "fast"}, r"rates.chips.c0.fp32.gemm_flops = fast"),
        ({"bytes_per_second": 0}, r"bytes_per_second = 0"),
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
    with pytest.raises(UserError, match=r"rates.links\[0\].beta: key 'beta' is missing"):
        with_links({"within": "n", "alpha": 1e-6})
    with refused("rates.links[0].collectives.gather", "all_to_all, exchange"):
        with_links({"within": "n", "beta": 1e-9, "collectives": {"gather": {"alpha": 1}}})
    with pytest.raises(UserError, match=r"collectives.exchange.beta = fast"):
        with_links({"within": "n", "beta": 1e-9, "collectives": {"exchange": {"beta": "fast"}}})
    with pytest.raises(UserError, match=r"rates.chips.H100-SXM"):
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
            link = model.tp_link(model.cluster.nodes[0], tp) if tp > 1 else None
            assert model.tp_exchange_seconds(tp, 1, link) == pytest.approx(expected)
            found, host_seconds = LinkModel(model.rates).tp_exchange(tuple(range(tp)), size)
            assert found == pytest.approx(expected) and host_seconds == 0.5 * (tp - 1)


def test_ranks_of_a_tensor_parallel_group_wait_for_each_other_at_every_exchange() -> None:
    """In the closed form, in the prediction of a plan, and with a context group; never without TP or in compute."""
    mark = model_fingerprint(MODEL)
    where = cluster(nodes=1, per_node=4, waiting=[[mark, 2, 1, SEQ, 0.25, 0.5]])
    model, bare = (CostModel(MODEL, c, SEQ, "fp32") for c in (where, cluster(nodes=1, per_node=4)))
    for tp, waits in ((1, 0), (2, 4 * 11 + 2)):
        stage = StageChoice("c0", tp, 1, 11, True, True)
        assert model.forward_seconds(stage, 1) == pytest.approx(bare.forward_seconds(stage, 1) + 0.25 * waits)
        assert model.backward_seconds(stage, 1) == pytest.approx(bare.backward_seconds(stage, 1) + 0.5 * waits)
    parts = {"context": [{"ranks": [[0, 1], [2, 3]], "tokens": [32, 32], "heads": [4, 4]}], "ranks": [0, 1, 2, 3]}
    for written in ({"ranks": [0, 1], "tp": 2}, parts):
        spelled = plan_from_dict(plan((3, [{"layers": [0, 11], **written}])), MODEL)
        waited, never = (predict(spelled, MODEL, c.cluster, costs=c) for c in (model, bare))
        more = waited.timelines[0].busy[0] - never.timelines[0].busy[0]
        half = 0.5 if "context" in written else 1.0  # for 32 tokens, by the operators
        assert more == pytest.approx(3 * 46 * 0.75 * half, rel=0.03 if "context" in written else 1e-6)
        if "context" not in written:
            assert StepSimulator(spelled, model).computing == StepSimulator(spelled, bare).computing


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
    link = LinkModel(model.rates).link("n", "n", False)
    size = 2048 * LLAMA.hidden_size * 2
    assert model.boundary_seconds(*choices, 1, link) == pytest.approx(link.alpha + size * link.link)


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
    assert many[1] > 1.25 * model.memory_bytes(replace(base, recompute="elementwise"), 1, 8, 1).activations > many[2]
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


def test_rates_are_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the chip or under ``rates``, where calibrate writes: both would hide one of them. By dtype they add up."""
    slow, fast = {"gemm_flops": 1e9, "bytes_per_second": 1e9}, {"gemm_flops": 1e12, "bytes_per_second": 1e12}
    data: dict[str, Any] = {
        "nodes": [{"name": "a", "chip": "c"}],
        "chips": {"c": {"memory": "1 GiB", "dtypes": ["fp32", "bf16"], "rates": {"fp32": slow}}},
        "rates": {"chips": {"c": {"fp32": fast}}},
    }
    with pytest.raises(UserError, match=r"chips.c.rates.fp32: rates.chips.c.fp32, where calibrate writes"):
        load_rates(cluster_from_dict(data), "fp32")
    data["rates"] = {"chips": {"c": {"bf16": fast}}}
    found = cluster_from_dict(data)
    assert [load_rates(found, d).chips["c"].gemm_flops for d in ("fp32", "bf16")] == [1e9, 1e12]
    file, more = tmp_path / "c.yaml", tmp_path / "more.yaml"
    text = yaml.safe_dump(data)
    file.write_text(text)
    more.write_text(yaml.safe_dump({"rates": {"chips": {"c": {"fp32": fast}}}}))
    assert main(["calibrate", "--cluster", str(file), "--merge", str(more)]) == 2
    assert "chips.c.rates.fp32" in capsys.readouterr().err and file.read_text() == text


def test_emulated_latency_is_what_a_message_takes_and_survives_being_written() -> None:
    nodes = [{"name": "a", "chip": "L4", "count": 2, "chips_per_node": 2}]
    emulated = {"bandwidth": "1 GB/s", "latency": "5 us", "emulate": {"latency": "2 ms"}}
    links = {"intra_node": emulated, "inter_node": {**emulated, "emulate": {"latency": "3 ms", "bandwidth": "1 MB/s"}}}
    first = cluster_from_dict({"nodes": nodes, "links": links})
    for known in (first, cluster_from_dict(document(first))):
        rates = load_rates(known, "bf16")
        assert (rates.link(0, 1).alpha, rates.link(0, 2).alpha) == (pytest.approx(2e-3), pytest.approx(3e-3))
        assert rates.link(0, 2).beta == pytest.approx(1e-6)


@pytest.mark.parametrize(("text", "grown"), [("2xgpu-node", 1), ("2xgpu", 0), ("1xb-node", 2), ("1xL4", 0)])
def test_a_group_whose_name_ends_in_node_can_be_named(text: str, grown: int) -> None:
    nodes = [{"name": name, "chip": "L4"} for name in ("gpu", "gpu-node", "b")]
    more = with_more(cluster_from_dict({"nodes": nodes}), text)
    assert [g.count for g in more.nodes] == [1 + int(text[0]) * (i == grown) for i in range(3)]


def test_a_head_in_chunks_makes_its_gradients_in_forward() -> None:
    """Three products in F, none in B; so do a third and two thirds in one piece."""
    whole, chunked = (
        CostModel(LLAMA, dgx(), 4096, options=CostOptions(logits_bytes=limit)).operators("A100-80-SXM")
        for limit in (1 << 40, 1 << 20)
    )
    apart, together = (operators.head(1.0, 4, 4096) for operators in (whole, chunked))
    product = whole.gemm(4 * 4096, LLAMA.vocab_size, LLAMA.hidden_size)
    assert apart[0] > product and apart[1] > 2 * product
    assert together[0] == pytest.approx(sum(apart)) and together[1] < 0.01 * together[0]
    assert chunked.split_head(1.0, 4, 4096) == (together[1], 0.0)
    assert whole.head(1.0, 4, 4096, chunked=True) == pytest.approx(together)
    small = CostModel(LLAMA, dgx(), 4096).operators("A100-80-SXM")
    at_once = (1 << 30) // (4 * LLAMA.vocab_size) // 4096
    assert small.head(1.0, at_once, 4096) == whole.head(1.0, at_once, 4096)
    assert small.head(1.0, at_once + 1, 4096)[1] < 0.01 * whole.head(1.0, at_once + 1, 4096)[1]
