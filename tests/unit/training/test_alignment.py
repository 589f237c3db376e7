"""Precision alignment: a real step is captured and compared, a fault is located, drifting losses are stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.cli.main import main
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.model import GPTStage, initial_values
from hetero_megatron.ops import SPECS, Kernel, KernelPlan, Signature, resolve, torch_registry
from hetero_megatron.ops.norm import add_rms_norm_backward, add_rms_norm_forward
from hetero_megatron.ops.spec import VENDOR
from hetero_megatron.ops.stage import stage_signatures
from hetero_megatron.spec import ModelSpec, load_model, logical_tensors, shares
from hetero_megatron.training.alignment.capture import Call, CallRecorder, CaptureFiles, LiveCompare, load_call
from hetero_megatron.training.alignment.drift import loss_drift
from hetero_megatron.training.alignment.dump import LayerDump, compare_dumps
from tests.support.programs import run_ranks


def build(wrap: Any = None, kernels: KernelPlan | None = None) -> tuple[GPTStage, ModelSpec]:
    spec = load_model("tiny")
    share = shares(spec, (1,))[0]
    if kernels is None:
        signatures = stage_signatures(Signature("", "cpu", torch.float32), spec, share, True, 1)
        kernels = resolve(torch_registry(), signatures)
    model = GPTStage(
        spec, share, range(spec.num_layers), True, True, kernels=wrap(kernels) if wrap is not None else kernels
    )
    tensors = {t.name: t for t in logical_tensors(spec)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            t = tensors[name]
            p.copy_(initial_values(t, Box((0,) * len(t.shape), t.shape), spec, 5))
    return model, spec


def step(model: GPTStage, spec: ModelSpec) -> None:
    from hetero_megatron.data.batch import Batch

    tokens = torch.randint(0, spec.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(16).expand(2, 16))
    model.kernels.cross_entropy(model(batch.tokens, batch), batch.labels).sum().backward()


def spoiled(layer_call: int) -> KernelPlan:
    """A plan whose add_rms_norm goes wrong in its n-th call, by 2 %."""
    calls = [0]

    def forward(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, ...]:
        calls[0] += 1
        y, *more = add_rms_norm_forward(x, residual, weight, eps)
        return (y * 1.02 if calls[0] == layer_call else y), *more

    registry = torch_registry()
    registry.register(Kernel("add_rms_norm", "acme", VENDOR, forward, add_rms_norm_backward))
    spec = load_model("tiny")
    base = Signature("", "cpu", torch.float32)
    return resolve(registry, stage_signatures(base, spec, shares(spec, (1,))[0], True, 1))


def test_live_comparison_of_a_real_step_is_within_the_bounds_and_finds_a_fault() -> None:
    compare = LiveCompare(SPECS)
    watch = CallRecorder(compare)
    model, spec = build(watch.wrap)
    watch.follow(model)
    step(model, spec)
    assert compare.over_bounds(torch.float32) == []
    seen = {(d.op, d.provider) for d in compare.deviations}
    expected = ("gemm", "rms_norm", "add_rms_norm", "rope", "swiglu", "attention", "cross_entropy")
    assert seen == {(op, "aten") for op in expected}
    assert any(d.backward > 0 for d in compare.deviations)
    assert {d.layer for d in compare.deviations if d.op == "swiglu"} >= {"layers.0.mlp"}
    assert "0 over the bounds" in compare.text(torch.float32)

    compare = LiveCompare(SPECS)
    watch = CallRecorder(compare, ["add_rms_norm"])
    model, spec = build(watch.wrap, spoiled(4))  # of the MLP, and before the attention of all layers but the first
    watch.follow(model)
    step(model, spec)
    (bad,) = compare.over_bounds(torch.float32)
    assert (bad.op, bad.provider, bad.layer) == ("add_rms_norm", "acme", "layers.2.input_layernorm")
    assert abs(bad.forward - 0.02) < 1e-3


def test_chosen_operators_and_layers_are_captured_and_can_be_read(tmp_path: Path) -> None:
    files = CaptureFiles(tmp_path)
    watch = CallRecorder(files, ["attention", "swiglu"], ["layers.1."])
    model, spec = build(watch.wrap)
    watch.follow(model)
    step(model, spec)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 2 and all(n.startswith("layers.1.") for n in names)
    call = load_call(tmp_path / next(n for n in names if "swiglu" in n))
    gate, up = call.args
    torch.testing.assert_close(call.results[0], torch.nn.functional.silu(gate) * up)
    assert set(call.grads) == {"dy", "gate", "up"}
    torch.testing.assert_close(call.grads["up"], call.grads["dy"] * torch.nn.functional.silu(gate))
    (tmp_path / "no.pt").write_bytes(b"no")
    with pytest.raises(UserError, match="not a captured operator"):
        load_call(tmp_path / "no.pt")


def test_the_first_diverging_layer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kernels in (("good", None), ("same", None), ("bad", spoiled(2))):
        model, spec = build(kernels=kernels)
        dump = LayerDump(model, tmp_path / name, 0)
        step(model, spec)
        dump.write(1)
        dump.close()
    assert compare_dumps(tmp_path / "good", tmp_path / "same", 0.0).ok
    result = compare_dumps(tmp_path / "good", tmp_path / "bad", 1e-3)
    assert result.first is not None and result.first.tensor == "layers.1.input_layernorm"
    forward = [r for r in result.rows if "gradient" not in r.tensor]
    before = [r for r in forward if r.tensor.startswith(("embed_tokens", "layers.0."))]
    assert len(before) >= 4 and all(r.error == 0 for r in before)
    assert main(["plugins", "compare", str(tmp_path / "good"), str(tmp_path / "bad")]) == 1
    assert "first diverging: layers.1.input_layernorm" in capsys.readouterr().out
    assert main(["plugins", "compare", str(tmp_path / "good"), str(tmp_path / "same"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert main(["plugins", "compare", str(tmp_path / "good"), str(tmp_path)]) == 2


def losses(path: Path, values: list[float | None], start: int = 1) -> Path:
    rows = [json.dumps({"step": i, "loss": v}) for i, v in enumerate(values, start)]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_loss_drift_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = losses(tmp_path / "a.jsonl", [4.0, 2.0, 1.0])
    near = losses(tmp_path / "b.jsonl", [4.04, 2.0, 1.02])
    drift = loss_drift(base, near, 0.015)
    assert drift.ok and drift.steps == 3 and drift.worst_step == 3
    assert drift.mean == pytest.approx(0.01) and drift.worst == pytest.approx(0.02)
    assert not loss_drift(base, near, 0.009).ok
    assert loss_drift(base, losses(tmp_path / "c.jsonl", [2.0, 1.0], start=2), 0.0).steps == 2
    assert main(["plugins", "drift", str(base), str(near)]) == 0
    assert main(["plugins", "drift", str(base), str(near), "--threshold", "0.009", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is False
    for other, says in ((losses(tmp_path / "d.jsonl", [1.0], start=9), "no step in common"),
                        (tmp_path / "none", "cannot read the file"),
                        (losses(tmp_path / "e.jsonl", [None]), "no step with a loss")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            loss_drift(base, other, 0.015)


@pytest.mark.slow
def test_the_flags_of_a_run(tmp_path: Path) -> None:
    words = [
        "--model", "tiny", "--mock-data", "--seq-length", "32", "--lr", "1e-3",
        "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "2",
        "--dump-layers", f"{tmp_path}/dump", "--check-operators", "rms_norm", "attention",
        "--capture-operators", f"{tmp_path}/ops", "--align-layers", "layers.0.",
    ]  # fmt: skip
    said, _ = run_ranks(1, words)
    assert "against fp64" in said and ", 0 over the bounds" in said
    assert [p.name for p in (tmp_path / "dump").iterdir()] == ["step000001-rank00000.safetensors"]
    assert {".".join(p.name.split(".")[:2]) for p in (tmp_path / "ops" / "rank00000").iterdir()} == {"layers.0"}


def test_a_watched_plan_gives_the_same_numbers() -> None:
    calls: list[Call] = []
    model, spec = build(CallRecorder(calls.append).wrap)
    plain, _ = build()
    for m in (model, plain):
        step(m, spec)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name
    assert len(calls) > 20 and replace(calls[0], index=3).index == 3
