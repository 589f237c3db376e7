"""Which module computes the linear attention of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hetero_megatron.spec import ModelSpec


def linear_mixer(spec: ModelSpec) -> Callable[..., nn.Module]:
    """Module of the layers of a model that have linear attention."""
    assert spec.delta is not None
    if spec.delta.mixer == "mamba2":
        from hetero_megatron.model.state_space import StateSpaceMixer

        return StateSpaceMixer
    if spec.delta.by_feature:
        from hetero_megatron.model.kimi_delta import KimiDeltaNet

        return KimiDeltaNet
    from hetero_megatron.model.gated_delta_net import GatedDeltaNet

    return GatedDeltaNet
