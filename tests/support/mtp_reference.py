"""Multi-token prediction by its definition, over transformers' models: the modules are composed of the layer, norm and
embedding classes of the model's own family, whose model classes leave them out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hetero_megatron.data.batch import Batch
from hetero_megatron.spec import ModelSpec
from tests.support.hf_reference import hf_logits, make_exact


def add_predictions(hf: Any, spec: ModelSpec, count: int, factor: float, seed: int) -> ModelSpec:
    """Append ``count`` modules to the layers of a model, which runs ``num_hidden_layers`` of them; the spec with
    them."""
    torch.manual_seed(seed)
    layers, config, dtype = hf.model.layers, hf.config, hf.lm_head.weight.dtype
    norm = type(hf.model.norm)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [*kinds, *[kinds[-1]] * count]
    for _ in range(count):
        module = type(layers[-1])(config, len(layers)).to(dtype)
        module.enorm, module.hnorm = (norm(config.hidden_size, spec.norm_eps).to(dtype) for _ in range(2))
        module.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, dtype=dtype)
        module.embedding = nn.Identity()  # what the model's embedding is for it, where dropout is put
        module.shared_head = nn.ModuleDict({"norm": norm(config.hidden_size, spec.norm_eps).to(dtype)})
        with torch.no_grad():
            for name, param in module.named_parameters():
                noise = torch.randn(param.shape, dtype=torch.float32)
                param.copy_(noise * (0.02 if "norm" in name else 0.15) + (1.0 if "norm" in name else 0.0))
            for name, buffer in module.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn(buffer.shape) * 0.2)
        module.eval()
        make_exact(module, dtype)
        layers.append(module)
    if kinds is not None:
        config.layer_types = kinds
    return replace(spec, mtp_layers=count, mtp_loss_factor=factor)


def prediction_losses(hf: Any, batch: Batch, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(Sums of the losses that count: the main one, then of each module; positions that count of each module, [b, s]),
    position by position as the report has it."""
    b, s = batch.tokens.shape
    known: dict[str, Any] = {}
    last = hf.model.layers[hf.config.num_hidden_layers - 1]
    hooks = [
        last.register_forward_pre_hook(lambda _, args, more: known.update(args=args[1:], more=more), with_kwargs=True),
        hf.model.norm.register_forward_hook(lambda _, args, out: known.update(x=out)),
    ]
    logits = hf_logits(hf, batch.tokens, batch.positions, batch.documents)
    for hook in hooks:
        hook.remove()
    counts = torch.ones(b, s, dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask
    sums, masks, x = [_summed(logits, batch.labels, counts)], list[torch.Tensor](), known["x"]
    for k, module in enumerate(hf.model.layers[hf.config.num_hidden_layers :], start=1):
        tokens, labels, mask = torch.zeros_like(batch.tokens), torch.zeros_like(batch.labels), torch.zeros_like(counts)
        for row in range(b):
            starts = batch.documents[row] if batch.documents is not None else [0]
            for i in range(s - k):
                if not any(i < start <= i + k for start in starts):
                    tokens[row, i], labels[row, i] = batch.labels[row, i + k - 1], batch.labels[row, i + k]
                    mask[row, i] = counts[row, i + k]
        table = hf.model.embed_tokens
        embedded = F.embedding(tokens, table.weight) * getattr(table, "embed_scale", 1.0)
        embedded = module.embedding(embedded * getattr(hf.config, "embedding_multiplier", 1.0))
        x = module.eh_proj(torch.cat([module.enorm(embedded), module.hnorm(x)], dim=-1))
        more = {name: value for name, value in known["more"].items() if name != "hidden_states"}
        x = type(module).forward(module, x, *known["args"], **more)
        x = module.shared_head["norm"](x[0] if isinstance(x, tuple) else x)
        logits = hf.lm_head(x) / getattr(hf.config, "logits_scaling", 1.0)
        cap = getattr(hf.config, "final_logit_softcapping", None)
        sums.append(_summed(logits if cap is None else cap * torch.tanh(logits / cap), labels, mask))
        masks.append(mask)
    assert len(masks) == count
    return sums, masks


def _summed(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (losses * mask).sum()
