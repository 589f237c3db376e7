"""Recompute of elementwise results: what a layer keeps is the formula to the byte, and gradients are the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.dry_run.allocator import MemoryTracker
from hetero_megatron.model import GPTStage
from hetero_megatron.parallel.recompute import apply_recompute
from hetero_megatron.parallel.tensor import apply_tensor_parallel
from hetero_megatron.plans import Recompute
from hetero_megatron.spec import ModelSpec, shares
from hetero_megatron.spec.activation_bytes import layer_activation_bytes
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.families import DENSE
from tests.support.moe_models import MOE_FAMILIES

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 88}
# Of each kind: norms before, after, both, one for two blocks, two for two blocks; gated or not, also by GELU.
CASES = (
    ("llama_yarn", 2, torch.float32), ("gemma2", 4, torch.bfloat16), ("olmo2", 2, torch.float32),
    ("cohere", 1, torch.bfloat16), ("cohere", 2, torch.float32), ("gpt_neox", 1, torch.float32),
)  # fmt: skip
EXPERTS = ("qwen3_moe", "qwen2_moe", "deepseek_v2", "llama4")


def stage_of(spec: ModelSpec, tp: int, dtype: torch.dtype, recompute: str, layers: int = 1) -> GPTStage:
    share = shares(spec, (1,) * tp)[0]
    stage = GPTStage(spec, share, range(layers), False, False, dtype)
    if tp > 1:
        comm = FakeComm(0, torch.device("cpu"))
        comm.create_groups([tuple(range(tp))])
        heads = [each.kv_heads for each in shares(spec, (1,) * tp)]
        apply_tensor_parallel(stage, comm.group(tuple(range(tp))), (16 // tp,) * tp, share.vocab, heads)
    apply_recompute(stage, Recompute(recompute))
    return stage


def batch(rows: int, length: int) -> Any:
    positions = torch.arange(length).expand(rows, length)
    return SimpleNamespace(positions=positions, documents=None, loss_mask=None, draws=None)


def kept(spec: ModelSpec, tp: int, dtype: torch.dtype, recompute: str, layers: int = 1) -> int:
    """Bytes that are there after forward and were not before it."""
    with MemoryTracker() as memory:
        stage, given = stage_of(spec, tp, dtype, recompute, layers), batch(2, 16)
        before = memory.live
        # Not a leaf, so that whoever wants it for backward has to keep it.
        out = stage(torch.zeros(2, 16 // tp, spec.hidden_size, dtype=dtype).requires_grad_() * 1.0, given)
        assert out.requires_grad
        return memory.live - before


def test_what_is_not_kept_is_the_formula_to_the_byte() -> None:
    for name, tp, dtype in CASES:
        spec = from_hf_config(DENSE[name] | WIDE | {"head_dim": 16})
        with FakeTensorMode(allow_non_fake_inputs=True):
            none, elementwise = (kept(spec, tp, dtype, kind) for kind in ("none", "elementwise"))
        want = [layer_activation_bytes(spec, 32, kind, dtype.itemsize, tp) for kind in ("none", "elementwise")]
        assert none - elementwise == want[0] - want[1] > 0, (name, tp)


def test_experts_keep_neither_products_nor_the_routers_input() -> None:
    for name in EXPERTS:
        spec = from_hf_config(MOE_FAMILIES[name])
        layers = spec.num_layers
        none, elementwise = (kept(spec, 1, torch.float32, kind, layers) for kind in ("none", "elementwise"))
        want = [layers * layer_activation_bytes(spec, 32, kind, 4) for kind in ("none", "elementwise")]
        numbers = layers * 4 * 32 * 4  # of each token for a norm, which are not always seen in real memory
        assert abs(none - elementwise - (want[0] - want[1])) <= numbers < (want[0] - want[1]) / 8, name


def gradients(spec: ModelSpec, recompute: str) -> list[torch.Tensor]:
    stage = stage_of(spec, 1, torch.float64, recompute, spec.num_layers)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in stage.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)
    x = torch.randn(2, 16, spec.hidden_size, generator=generator, dtype=torch.float64, requires_grad=True)
    for _ in range(2):  # two micro-batches in flight at once
        out = stage(x, batch(2, 16))
        other = stage(x * 0.5, batch(2, 16))
        (out.square().sum() + other.sin().sum()).backward()
    return [out.detach(), x.grad, *(p.grad for p in stage.parameters())]  # type: ignore[list-item]


def test_gradients_are_the_same_bits() -> None:
    for config in (DENSE["gemma2"], DENSE["cohere"], DENSE["olmo2"], MOE_FAMILIES["deepseek_v2"]):
        spec = from_hf_config(config)
        for mine, plain in zip(gradients(spec, "elementwise"), gradients(spec, "none"), strict=True):
            assert torch.equal(mine, plain), spec.name


def test_a_result_that_was_written_to_is_kept_as_it_is() -> None:
    from hetero_megatron.parallel.elementwise import Results

    x, results = torch.randn(4, dtype=torch.float64, requires_grad=True), Results()

    def layer(x: torch.Tensor, write: bool) -> torch.Tensor:
        y = results.of(torch.cos, x.sin())
        if write:
            y = y.mul_(2.0)
        return y * y.cos()

    for write in (False, True):
        x.grad = None
        results.during(layer, x, write).sum().backward()
        found, x.grad = x.grad, None
        y = x.sin().cos() * (2.0 if write else 1.0)
        (y * y.cos()).sum().backward()
        torch.testing.assert_close(found, x.grad)
