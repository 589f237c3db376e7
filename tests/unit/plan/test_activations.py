"""The key ``activations`` of a stage: its spellings, what is refused, and that a plan keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, dump_yaml, format_plan, load_plan, plan_from_dict
from hetero_megatron.plans.canonical import ActivationOffload
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.spec import load_model
from hetero_megatron.training.runtime_options import RuntimeOptions, stages_fit
from tests.support.small_plans import pipe, plan, stage

SPEC = load_model("tiny")


def made(activations: Any, **more: Any) -> Plan:
    away = {} if activations is None else {"activations": activations}
    return plan_from_dict(plan([pipe(1, 2, stage([0], [0, 4], **away, **more), stage([1], [4, 6]))], 16), SPEC)


def test_spellings_of_one_choice_are_one_plan(tmp_path: Any) -> None:
    spelled = {"all": 4, "none": 0}
    for value, layers in [*spelled.items(), *(({"first": n}, n) for n in range(5))]:
        found = made({"offload": value})
        assert found.stages[0].activations == (ActivationOffload(layers) if layers else None), value
        (path := tmp_path / "plan.yaml").write_text(dump_yaml(found))
        again = load_plan(path, SPEC)
        assert again == found and again.fingerprint() == found.fingerprint(), value
    assert made({"offload": {"first": 4}}).fingerprint() == made({"offload": "all"}).fingerprint()
    assert made({"offload": "none"}).fingerprint() == made(None).fingerprint()
    assert made({"offload": "all", "ahead": 2}).fingerprint() != made({"offload": "all"}).fingerprint()
    assert "offload: all" in dump_yaml(made({"offload": "all"})) and "ahead: 3" in dump_yaml(
        made({"offload": {"first": 1}, "ahead": 3})
    )
    assert "1 layer offloaded" in format_plan(made({"offload": {"first": 1}}), SPEC)


def test_what_cannot_be_is_refused_by_name() -> None:
    wrong: list[tuple[Any, str, str]] = [
        ({"offload": "some"}, "activations.offload", "all, none or {first: n}"),
        ({"offload": True}, "activations.offload", "all, none or {first: n}"),
        ({"offload": 3}, "activations.offload", "all, none or {first: n}"),
        ({"offload": [0, 1]}, "activations.offload", "all, none or {first: n}"),
        ({"offload": {"first": 5}}, "activations.offload.first", "0 to 4"),
        ({"offload": {"first": -1}}, "activations.offload.first", ""),
        ({"offload": {"last": 1}}, "activations.offload.last", "first"),
        ({"offload": "all", "ahead": 0}, "activations.ahead", ""),
        ({"ahead": 1}, "activations", "offload"),
        ({"offloads": "all"}, "activations.offloads", "offload"),
        ("all", "activations", ""),
    ]
    for value, field, accepted in wrong:
        with pytest.raises(UserError) as caught:
            made(value)
        assert field in str(caught.value.field) and accepted in str(caught.value), (value, str(caught.value))


def test_compiled_layers_and_graphs_are_refused_and_fp8_is_not() -> None:
    offloaded = made({"offload": "all"})
    for options, flag in ((RuntimeOptions("inductor"), "--compile"), (RuntimeOptions(graphs_after=2), "--cuda-graph")):
        with pytest.raises(UserError, match=f"activations cannot be in host memory beside .*{flag}"):
            stages_fit(options, offloaded)
    stages_fit(RuntimeOptions(fp8=Fp8("e4m3", "tensorwise")), offloaded)


BASE = (
    "--model", "tiny", "--seq-length", "64", "--micro-batch-size", "1", "--mock-data", "--train-iters", "1", "--lr",
    "1e-3", "--dry-run",
)  # fmt: skip
WHOLE, SOME, MODULES = "--fine-grained-activation-offloading", "--cpu-offloading-num-layers", "--offload-modules"
ALL_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


def flagged(*words: str) -> Plan:
    return configure([*BASE, *words], {"WORLD_SIZE": "2"}).plan


def test_megatrons_flags_become_such_plans() -> None:
    pipelined: tuple[str, ...] = ("--pipeline-model-parallel-size", "2")
    inflight = "--fine-grained-offloading-max-inflight-offloads"
    for words, layers, ahead in (
        ((WHOLE,), 3, 1), ((WHOLE, inflight, "2"), 3, 2), ((WHOLE, MODULES, *ALL_MODULES), 3, 1),
        ((SOME, "2"), 2, 1), ((SOME, "2", "--cpu-offloading"), 2, 1), ((SOME, "9"), 3, 1), ((SOME, "0"), 0, 1),
        ((WHOLE, "--recompute-granularity", "full"), 3, 1), ((WHOLE, "--min-offloaded-tensor-size", "7"), 3, 1),
    ):  # fmt: skip
        expected = ActivationOffload(layers, ahead) if layers else None
        assert {s.activations for s in flagged(*pipelined, *words).stages} == {expected}, words
    for words, flag, accepted in (
        ((WHOLE, MODULES, "core_attn"), MODULES, "mlp_norm"), ((WHOLE, MODULES, "core_atn"), MODULES, "core_attn"),
        ((WHOLE, SOME, "1"), SOME, "one of the two"), (("--cpu-offloading",), "--cpu-offloading", SOME),
        (("--activation-offload-fraction", "0.5"), "--activation-offload-fraction", "offload: {first: n}"),
        (("--delta-offload-bytes-across-pp-ranks", "1"), "--delta-offload-bytes-across-pp-ranks", "{first: n}"),
        (("--delay-offload-until-cuda-graph",), "--delay-offload-until-cuda-graph", "leave"),
        ((*pipelined, "--num-layers-per-virtual-pipeline-stage", "1", SOME, "1"), SOME, WHOLE),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            flagged(*words)
        assert flag in str(caught.value) and accepted in str(caught.value), (words, str(caught.value))
