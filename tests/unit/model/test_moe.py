"""Mixtures of experts equal transformers' models: logits, losses and gradients in fp64; files in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.ops import cross_entropy
from hetero_megatron.spec import logical_tensors
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.hf_export import export_config
from tests.support.hf_reference import hf_grads, hf_logits, hf_loss_sum, hf_to_logical, make_hf
from tests.support.moe_models import HYBRIDS, MAMBAS, MOE_FAMILIES
from tests.unit.model.test_hf import build, error, micro_batch


@pytest.mark.parametrize("family", MOE_FAMILIES | HYBRIDS | MAMBAS)
def test_equals_transformers(family: str) -> None:
    hf, spec = make_hf((MOE_FAMILIES | HYBRIDS | MAMBAS)[family], seed=3)
    weights = hf_to_logical(hf, spec)
    assert all(tuple(weights[t.name].shape) == t.shape for t in logical_tensors(spec))
    stage, batch = build(spec, weights, torch.float64), micro_batch(spec.vocab_size, [[0, 3, 4, 12], [0], [0, 9]])
    args = batch.tokens, batch.positions, batch.documents
    logits = stage(batch.tokens, batch)
    assert error(logits, hf_logits(hf, *args)) < 1e-12
    loss = cross_entropy(logits, batch.labels).sum()
    want = hf_loss_sum(hf, batch.tokens, batch.labels, batch.positions, batch.documents, None)
    assert error(loss, want) < 1e-12
    loss.backward()
    want.backward()
    grads = hf_grads(hf, spec)
    trained = {t.name for t in logical_tensors(spec) if t.trained and not t.by_load}
    for name, param in stage.named_parameters():
        if name in trained:
            assert param.grad is not None and error(param.grad, grads[name]) < 1e-11, name


@pytest.mark.parametrize("family", ["llama4", "llama4_other_layers"])
def test_chunks_are_those_of_transformers_masks(family: str) -> None:
    hf, spec = make_hf((MOE_FAMILIES | HYBRIDS | MAMBAS)[family], seed=5)
    stage, batch = build(spec, hf_to_logical(hf, spec), torch.float64), micro_batch(spec.vocab_size, None)
    assert error(stage(batch.tokens, batch), hf(input_ids=batch.tokens, use_cache=False).logits) < 1e-12


@pytest.mark.parametrize("family", MOE_FAMILIES | HYBRIDS | MAMBAS)
def test_reads_what_transformers_writes(family: str, tmp_path: Path) -> None:
    """Any box of experts and columns; the configuration says the same again."""
    hf, spec = make_hf((MOE_FAMILIES | HYBRIDS | MAMBAS)[family], seed=4, dtype=torch.float32)
    hf.save_pretrained(tmp_path)  # type: ignore[operator]
    files, weights = HFWeights(str(tmp_path), spec), hf_to_logical(hf, spec)
    for tensor in logical_tensors(spec):
        whole = Box.whole(tensor.shape)
        assert torch.equal(files.read(tensor, whole), weights[tensor.name]), tensor.name
        if tensor.per_expert:
            last = tensor.shape[2:]
            part = Box((1, 2, *[0] * len(last)), (3, tensor.shape[1], *[n - 1 for n in last]))
            assert torch.equal(files.read(tensor, part), weights[tensor.name][part.slices()])
    again: dict[str, Any] = export_config(spec, None)
    assert from_hf_config(again, name=spec.name) == spec


def test_initial_values_do_not_depend_on_who_holds_which_expert() -> None:
    _, spec = make_hf(MOE_FAMILIES["mixtral"], seed=0)
    tensor = next(t for t in logical_tensors(spec) if len(t.shape) == 3)
    whole = initial_values(tensor, Box.whole(tensor.shape), spec, seed=5)
    part = Box((2, 3, 0), (4, tensor.shape[1], tensor.shape[2]))
    assert torch.equal(initial_values(tensor, part, spec, seed=5), whole[part.slices()])
    assert not torch.equal(whole[0], whole[1])
