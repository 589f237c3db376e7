"""The model in a checkpoint's metadata: what comes back of JSON is what was saved, of the same classes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from hetero_megatron.checkpoint.typed import stored_spec
from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.rates import model_fingerprint
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.state_space import StateSpace
from tests.support.families import DENSE, PARALLEL_BLOCKS
from tests.support.moe_models import HYBRIDS, MAMBAS, MOE_FAMILIES

MODELS = DENSE | PARALLEL_BLOCKS | MOE_FAMILIES | HYBRIDS | MAMBAS


def stored(spec: ModelSpec) -> Any:
    return json.loads(json.dumps(asdict(spec), allow_nan=False))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_comes_back(name: str) -> None:
    spec = from_hf_config(MODELS[name])
    back = stored_spec(stored(spec))
    assert back == spec and type(back.delta) is type(spec.delta)
    assert json.dumps(back.shape()) == json.dumps(spec.shape()) and model_fingerprint(back) == model_fingerprint(spec)


def test_what_a_layer_of_mamba_2_is_counts_for_its_fingerprint() -> None:
    spec = from_hf_config(MAMBAS["granite_hybrid"])
    assert isinstance(spec.delta, StateSpace) and spec.delta.step_limits == (0.0, None)
    for change in ({"conv_bias": False}, {"proj_bias": True}, {"key_dim": 3}):
        assert model_fingerprint(replace(spec, delta=replace(spec.delta, **change))) != model_fingerprint(spec)
    slower = replace(spec, delta=replace(spec.delta, step_limits=(0.5, 2.0)))
    assert model_fingerprint(slower) == model_fingerprint(spec) and stored_spec(stored(slower)) == slower


def test_neither_kind_of_linear_attention_is_refused_by_the_unknown_field() -> None:
    model = stored(from_hf_config(MAMBAS["granite_hybrid"]))
    with pytest.raises(UserError) as caught:
        stored_spec(model | {"delta": model["delta"] | {"gates": 1}})
    assert caught.value.field == "state.model.delta.gates"
    with pytest.raises(UserError) as caught:
        stored_spec(model | {"delta": [1]})
    assert caught.value.field == "state.model.delta"
