"""Multi-token prediction: modules after the last layer that are trained to predict tokens further ahead, as in
DeepSeek-V3.

Module k of D (k = 1, ..., D) has at position i the hidden state of module k - 1 there, after that one's final norm
(module 0 is the model itself), and the embedding of token i + k, by the model's own matrix. It projects both, each
after a norm, the embedding first, from 2 h to h; one decoder layer of the kind of the model's last one and a final norm
follow, and the model's own head gives the logits of token i + k + 1. What is trained is

    main loss + factor / D x sum over k of (sum of module k's losses of positions that count / tokens that count)

A position counts for module k where position i + k, whose label is its target, counts in the main loss and is in the
same sequence, and in the same document where attention does not cross documents: as Megatron masks rolled labels, also
of packed sequences. Every module's sum is divided by the number of tokens of the main loss, as in DeepSeek-V3's report
(1 / T for every k) and in Megatron with ``--calculate-per-token-loss``: one divisor for the whole step, which no plan
changes. Positions that do not count come after all that do in their document, so that causal attention never sees
them from one that counts, and it does not matter what is embedded there.

Modules run in training only. They are no part of the losses of evaluation, and generation ignores them.
"""

from __future__ import annotations

import torch
from torch import nn

from hetero_megatron.model.gpt import Layer
from hetero_megatron.model.layers import Context, Linear, Norm
from hetero_megatron.ops import KernelPlan
from hetero_megatron.spec import Dropout, ModelSpec, Share
from hetero_megatron.spec.dropout import NO_DROPOUT


class PredictionLayer(Layer):
    """One module without what it shares; see above. ``number``: that of its layer, which follows the model's own.

    The projection is in the dtype of the weights also where linear modules of layers are in fp8: a rank of a TP group
    has only its own tokens there, and a scale is of all tokens of a sequence.
    """

    def __init__(
        self, spec: ModelSpec, number: int, share: Share, kernels: KernelPlan, dropout: Dropout = NO_DROPOUT
    ) -> None:
        super().__init__(spec, number, share, kernels, dropout)
        h = spec.hidden_size
        self.enorm, self.hnorm = Norm(spec, h, kernels), Norm(spec, h, kernels)
        self.eh_proj = Linear(2 * h, h, bias=False, kernels=kernels)
        self.shared_head = nn.ModuleDict({"norm": Norm(spec, h, kernels)})

    def forward(self, x: torch.Tensor, context: Context, embedded: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x, embedded: [b, s, h], between the blocks, of a TP rank's own tokens -> what the head gets, [b, s, h]."""
        both = torch.cat([self.enorm(embedded), self.hnorm(x)], dim=-1)
        joined: torch.Tensor = self.kernels.gemm(both, self.eh_proj.weight, None)
        stream = super().forward(joined, context)
        return self.shared_head["norm"](stream.sum())  # type: ignore[no-any-return]
