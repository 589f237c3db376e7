"""The comparison with layer times of cards: what it says was timed, and that it finds the shares of made-up cards."""

from __future__ import annotations

import contextlib
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import bench_cards
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.cluster.catalogue import CHIPS
from hetero_megatron.predictor.cost.cost_options import (
    BOARDS,
    DOUBLED_FROM,
    FULL,
    HALF,
    OTHER,
    OTHER_FULL,
    PER_WATT,
    ShareOfPeak,
    allowance,
    share_of_peak,
)
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.spec import load_model
from hetero_megatron.spec.flops import layer_matmul_flops

VIEWS = (
    "view", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "squeeze", "slice", "select", "split", "detach",
    "alias", "permute", "empty_like", "as_strided",
)  # fmt: skip


class Bytes(TorchDispatchMode):
    """Counts what operators read and write in memory, but for products, attention and views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.__name__.split(".")[0]
        if name not in VIEWS and "mm" not in name and "attention" not in name:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            for x in tensors:
                elements = 1
                for size, stride in zip(x.shape, x.stride(), strict=True):
                    elements *= size if stride else 1  # broadcast
                self.count += elements * x.element_size()
        return out


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_bytes_of_transformers_layer(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    hidden, columns, heads, tokens = 128, 344, 4, 512
    config = llama.LlamaConfig(
        hidden_size=hidden, intermediate_size=columns, num_attention_heads=heads, num_hidden_layers=1,
        attn_implementation="sdpa",
    )  # fmt: skip
    layer, positions = llama.LlamaDecoderLayer(config, 0), torch.arange(tokens)[None]
    low = torch.bfloat16 if dtype == "fp16" else torch.float32  # as wide
    x = torch.randn(1, tokens, hidden, dtype=low, requires_grad=True)
    rotation = llama.LlamaRotaryEmbedding(config=config)(x, positions)
    forward, backward = Bytes(), Bytes()
    with torch.autocast("cpu", dtype=low) if dtype == "fp16" else contextlib.nullcontext():
        for mode in (contextlib.nullcontext(), forward):  # autocast keeps cast weights
            with mode:
                out = layer(x, position_embeddings=rotation, position_ids=positions)
            grad = torch.ones_like(out)
            with backward if mode is forward else contextlib.nullcontext():
                out.backward(grad)
    monkeypatch.setitem(bench_cards.LAYERS, "small", (hidden, columns, heads))
    stated = bench_cards.moved("small", dtype, tokens)
    assert forward.count == pytest.approx(stated[0], rel=0.03)
    assert backward.count == pytest.approx(stated[1], rel=0.03)


def test_shares_are_what_physics_allows() -> None:
    assert all(0 < share.value <= 1 for table in (HALF, FULL) for share in table.values())
    measured = statistics.median({share.value for share in HALF.values() if share.source})
    assert OTHER.value <= measured and share_of_peak("V100-16-SXM2", "fp32") == OTHER_FULL
    of_two = statistics.mean(FULL[name].value for name in DOUBLED_FROM)
    assert share_of_peak("RTX4090", "fp32").value == pytest.approx(of_two)
    for dtype, each in PER_WATT.items():  # what was measured of boards that their power limits
        limited = [share_of_peak(name, dtype) for name in BOARDS]
        found = [s.value / allowance(name, dtype) for s, name in zip(limited, BOARDS, strict=True) if s.source]
        assert len(found) >= 2 and each == pytest.approx(statistics.median(found), rel=0.02)
    for name in ("P100-16-PCIe", "W6800"):  # no matrix units: sums in fp32 are as fast as in fp32
        assert CHIPS[name].flops["fp16"] == CHIPS[name].flops["fp32"]


@pytest.mark.parametrize("gradients", [1.0, 1.4])
def test_products_and_their_gradients_together_have_the_share(gradients: float) -> None:
    rates = {
        "gemm_flops": ShareOfPeak(0.6, gradients=gradients).forward * 1e14, "gradient_speed": gradients,
        "attention_flops": 1e30, "bytes_per_second": 1e30, "layer_seconds": 0.0, "layer_backward_seconds": 0.0,
    }  # fmt: skip
    cluster = cluster_from_dict({
        "version": 1, "nodes": [{"name": "n", "chip": "c", "chips_per_node": 1}],
        "chips": {"c": {"memory": "80 GiB", "rates": {"fp32": {**rates, "gemm_half": 0.0}}}},
    })  # fmt: skip
    spec = load_model("llama3-8b")
    forward, backward = CostModel(spec, cluster, 1024, "fp32").operators("c").layer(1.0, 2, 1024)
    assert backward == pytest.approx(2 * forward / gradients)
    assert forward + backward == pytest.approx(3 * 2 * 1024 * layer_matmul_flops(spec) / 0.6e14)


@pytest.mark.parametrize("chip", ["A6000", "T4"])
def test_the_share_of_made_up_times_is_found(
    chip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [bench_cards.Entry("llama_7b", chip, 1024, "fp16", rows, 1.0, 1.0) for rows in (1, 2, 8)]
    share = ShareOfPeak(0.37)
    times = [[1 + error for error in bench_cards.errors(entry, share)] for entry in rows]
    exact = [
        bench_cards.Entry(entry.model, chip, entry.length, "fp16", entry.rows, *seconds)
        for entry, seconds in zip(rows, times, strict=True)
    ]
    assert bench_cards.fitted(tuple(exact)).value == pytest.approx(0.37)
    whole = [bench_cards.seconds(entry, share) for entry in rows]
    if chip == "T4":  # ahead by what it saved in the pause before, where that is not all
        assert whole[2][1] - times[2][1] == pytest.approx(bench_cards.RECOVERED * bench_cards.PAUSE)
        assert all(x <= y for pair in zip(times, whole, strict=True) for x, y in zip(*pair, strict=True))
    else:
        assert [x for pair in whole for x in pair] == pytest.approx([x for pair in times for x in pair])
    found = {"forward_ms": [1e3 * times[0][0]], "backward_ms": [1e3 * times[0][1]]}
    data = {"llama_7b": {"new": {"1024": {"float16": found}}, "unknown": {"1024": {"float16": found}}}}
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(data))
    monkeypatch.setattr("sys.argv", ["bench_cards.py", "--data", str(file), "--chip", f"new={chip}"])
    bench_cards.main()
    assert capsys.readouterr().out.count(chip) == 1  # in no fit, and not left out
    monkeypatch.setattr("sys.argv", ["bench_cards.py", "--data", str(file), "--chip", f"new={chip}", "--by", "model"])
    bench_cards.main()
    wanted = [f"{error:+.0%}" for error in bench_cards.errors(exact[0], share_of_peak(chip, "fp16"))]
    assert f"llama_7b {' '.join(wanted)}" in capsys.readouterr().out
