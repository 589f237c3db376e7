"""Kernels that are loaded when the driver starts, where no warm-up can know which ones a step will use."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hetero_megatron.plans import plan_from_dict
from hetero_megatron.platform import CPU, choose_platform
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.rank_platform import sizes_follow_data
from tests.support.small_plans import LLAMA, pipe, plan, stage

NAME = "HETERO_TEST_LOADING"
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


class Chip(CPU):
    """Says what its driver would have read when devices are first asked for."""

    name, eager_settings = "chip", {NAME: "EAGER"}

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def _here(self) -> bool:
        self.seen.append(os.environ.get(NAME))
        return True


@pytest.mark.parametrize(
    ("eager", "own", "holds"), [(False, "", None), (True, "", "EAGER"), (True, "LAZY", "LAZY"), (False, "LAZY", "LAZY")]
)
def test_the_driver_is_told_before_devices_are_asked_for(
    eager: bool, own: str, holds: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user set stays, and what holds is said."""
    monkeypatch.setenv(NAME, own)  # so that what is set meanwhile is taken back
    if not own:
        monkeypatch.delenv(NAME)
    chip = Chip()
    chosen = choose_platform([chip, CPU()], "chip", None, 0, eager=eager)
    assert set(chip.seen) == {holds}
    assert chosen.settings == ((f"{NAME}={holds}",) if eager else ())


def test_each_vendor_is_told_in_its_driver_s_words() -> None:
    """As the manuals of CUDA and HIP have it."""
    told = {name: dict(a.eager_settings) for name, a in load_plugins().platforms.items() if a.eager_settings}
    assert told == {"nvidia": {"CUDA_MODULE_LOADING": "EAGER"}, "amd": {"HIP_ENABLE_DEFERRED_LOADING": "0"}}


def test_when_sizes_follow_the_data() -> None:
    stages = [stage([0], [0, 1]), stage([1], [1, 3])]
    apart = plan([pipe(1, 2, stage([0], [0, 3])), pipe(1, 2, stage([1], [0, 3]))])
    both = plan([pipe(1, 2, stage([2], [0, 3])), pipe(1, 2, *stages)])
    cases: list[tuple[dict[str, Any], dict[str, Any], bool, bool]] = [
        (LLAMA, plan([pipe(1, 4, *stages)]), False, False), (LLAMA, plan([pipe(1, 4, *stages)]), True, True),
        (MIXTRAL, plan([pipe(1, 4, *stages)]), False, True), (MIXTRAL, apart, True, False),
        (MIXTRAL, both, False, True),
    ]  # fmt: skip
    for model, data, documents, follows in cases:
        spec = from_hf_config(model)
        assert sizes_follow_data(plan_from_dict(data, spec), spec, documents) is follows, (data, documents)
