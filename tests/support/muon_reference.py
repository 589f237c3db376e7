"""torch.optim.Muon over the matrices of a transformers model, with AdamW for all others; and ours with the same rates.

torch's runs Newton-Schulz in bf16 whatever the dtype of the weights: :func:`in_full_precision` lets its own code keep
theirs, so that results in fp64 can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hetero_megatron.parallel.optimizer import OptimizerFactory
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.muon import MuonRates
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.train import optimizer_factory
from tests.support.hf_reference import _logical

BETAS, EPS = (0.9, 0.95), 1e-8


TORCH = MuonRates(nesterov=True, coefficients="simple")  # what torch.optim.Muon does by default


def our_muon(rates: MuonRates = TORCH) -> OptimizerFactory:
    return optimizer_factory(OptimizerConfig("muon", *BETAS, EPS, muon=rates))


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Context in which ``x.bfloat16()``, which torch.optim.Muon begins with, is a copy of ``x``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        yield


def muon_has(name: str, values: torch.Tensor) -> bool:
    """Whether Muon updates a logical tensor: [out, in], or [experts, out, in]. Filters of convolutions are none."""
    return ".layers." in name and values.dim() >= 2 and not name.endswith(("bias", "_conv.weight"))


class LogicalMuon:
    """An optimizer of a transformers model that sees its parameters unfused, in Hugging Face's usual layout, and every
    expert's apart."""

    def __init__(self, hf: torch.nn.Module, spec: ModelSpec, lr: float, weight_decay: float) -> None:
        self.hf, self.spec = hf, spec
        self.values = dict(hf.named_parameters())
        at, places = 0, {}
        for name, p in [*hf.named_parameters(), *hf.named_buffers()]:
            places[name] = torch.arange(at, at + p.numel()).view(p.shape)
            at += p.numel()
        self.places = {name: where.long() for name, where in _logical(places, spec).items()}
        self.parts: list[tuple[str, int | None, torch.nn.Parameter]] = []
        flat = self._flat()
        for name, where in self.places.items():
            if where.dim() == 3 and muon_has(name, where):
                self.parts += [(name, e, torch.nn.Parameter(flat[w].clone())) for e, w in enumerate(where)]
            else:
                self.parts.append((name, None, torch.nn.Parameter(flat[where].clone())))
        matrices = [p for name, _, p in self.parts if muon_has(name, p)]
        others = [(name, p) for name, _, p in self.parts if not muon_has(name, p)]
        self.muon = torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw")
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in others if _decayed(n, p) == yes], "weight_decay": weight_decay * yes}
            for yes in (True, False)
        ]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS)

    def _flat(self) -> torch.Tensor:
        tensors = [*self.hf.named_parameters(), *self.hf.named_buffers()]
        wide = next(self.hf.parameters()).dtype
        return torch.cat([t.detach().reshape(-1).to(wide) for _, t in tensors])

    def zero_grad(self) -> None:
        self.hf.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        from tests.support.hf_reference import hf_grads

        grads = hf_grads(self.hf, self.spec)
        for name, e, p in self.parts:
            p.grad = (grads[name] if e is None else grads[name][e]).clone()
        with in_full_precision():
            self.muon.step()
        self.adamw.step()
        flat = self._flat()
        for name, e, p in self.parts:
            flat[self.places[name] if e is None else self.places[name][e]] = p.detach()
        at = 0
        for p in self.values.values():
            p.copy_(flat[at : at + p.numel()].view(p.shape))
            at += p.numel()


def _decayed(name: str, values: torch.Tensor) -> bool:
    return values.dim() > 1 and not name.endswith("bias")
