"""Where one rank is in a plan, and what it holds there."""

from __future__ import annotations

import torch

from hetero_megatron.parallel.vocab import loss_chunk
from hetero_megatron.plan import Plan, locate, stage_at, unit_at
from hetero_megatron.plan.context_plan import stage_contexts
from hetero_megatron.plan.experts import rank_shares
from hetero_megatron.plan.fp8 import Fp8
from hetero_megatron.plan.fp8_checks import stage_fp8
from hetero_megatron.spec import ModelSpec


class RankStage:
    """A rank's stage: what its kernels, its model and its steps are made from.

    Attributes:
        place: indices of its pipeline, stage and unit, and its rank in the unit's TP group.
        stage, unit: the plan's.
        share: of each layer and of the vocabulary, that this rank holds.
        context: its context group; None: it has whole sequences, or no attention.
        tiled: the stage has context groups, so that its attention merges partial results.
        path: of the stage in a plan file, for refusals.
    """

    def __init__(self, plan: Plan, spec: ModelSpec, rank: int) -> None:
        self.plan, self.spec, self.rank = plan, spec, rank
        self.place = locate(plan, rank)
        self.stage, self.unit = stage_at(plan, self.place), unit_at(plan, self.place)
        self.share = rank_shares(spec, self.stage)[rank]
        contexts = stage_contexts(spec, self.stage, plan.seq_length)
        self.context = next((c for c in contexts if rank in c.ranks), None)
        self.tiled = bool(contexts)
        self.path = f"pipelines[{self.place.pipeline}].stages[{self.place.stage}]"

    def fp8(self, default: Fp8 | None) -> Fp8 | None:
        """What its linear modules compute in, ``default`` where the stage does not say; None: in the weights' dtype."""
        return stage_fp8(self.stage, default) if self.stage.num_layers else None

    def loss_chunk(self, dtype: torch.dtype, logits_bytes: int) -> int | None:
        """Tokens of a micro-batch whose logits exist at once; None: those of all, or no head."""
        return loss_chunk(self.stage, self.place.unit, self.spec, dtype, logits_bytes)
