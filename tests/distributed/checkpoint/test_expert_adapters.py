"""Adapters of experts in files, in all forms that peft has for them, from plans that divide the experts unequally."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_megatron.checkpoint.adapter import AdapterWeights, merged, save_adapter
from hetero_megatron.checkpoint.adapter_config import CONFIG, WEIGHTS, adapter_config, read_config
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.empty_stage import BaseWeights
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, adapted, logical_tensors, trained_tensors
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.tensors import expert_tensor
from hetero_megatron.training.runtime import Runtime
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.moe_models import MAMBAS, MOE_FAMILIES
from tests.support.peft_reference import adapter_values, keep_fused_experts, keep_single_experts, peft_model
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

TARGETS = ("o_proj", "gate_proj", "up_proj", "down_proj")
TOKENS = torch.arange(12)[None] % 37
MODELS = MOE_FAMILIES | {"nemotron_h": MAMBAS["nemotron_h_experts"]}
FAMILIES = (
    "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "dots1",
    "nemotron_h",
)  # fmt: skip
WITH_MODULES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe")  # which peft knows by those names, too


def run_rank(
    comm: Comm, made: Plan, spec: ModelSpec, values: dict[str, np.ndarray], directory: str
) -> list[tuple[str, Box, np.ndarray]]:
    """Saves the adapters; returns what this rank owns of the base with them merged."""
    compiled = CompiledPlan(made, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in made.ranks:
        return []

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(values[tensor.name][box.slices()])

    runtime = Runtime(compiled, comm, torch.float64, initialize, lambda groups: torch.optim.SGD(groups, lr=1.0))
    assert runtime.optimizer is not None
    save_adapter(directory, spec, runtime.optimizer.owned(), torch.float64, runtime.world, "base")
    owners = {
        name: layout.of(comm.rank) for bucket in CompiledPlan(made, spec.base).buckets
        for name, layout in bucket.owners.items() if comm.rank in layout.ranks
    }  # fmt: skip
    held = BaseWeights(dict(runtime.stage_model.module.named_parameters()), runtime.stage_model.scales, torch.float64)
    norms = runtime.stage_model.row_norms
    gains = norms.gains() if norms is not None else {}
    parts = merged(spec, held, runtime.stage_model.boxes, owners, gains)
    return [(name, box, part.numpy()) for name, box, part in parts]


def logits(model: Any) -> np.ndarray:
    return model.double().eval()(TOKENS).logits.detach().numpy()  # type: ignore[no-any-return]


def read(directory: Path, spec: ModelSpec) -> dict[str, np.ndarray]:
    """All values of a directory, some of them box by box."""
    assert adapted(spec.base, read_config(str(directory), "x", spec.base)) == spec
    weights, found = AdapterWeights(str(directory), spec), {}
    for tensor in trained_tensors(spec):
        whole, middle = Box.whole(tensor.shape), [n // 2 for n in tensor.shape]
        found[tensor.name] = weights.read(tensor, whole).numpy()
        part = Box(tuple(middle), tensor.shape)
        np.testing.assert_array_equal(weights.read(tensor, part).numpy(), found[tensor.name][part.slices()])
        assert weights.read(tensor, Box(tensor.shape, tensor.shape)).shape == (0,) * len(tensor.shape)
    return found


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, values in found.items():
        np.testing.assert_array_equal(values, wanted[name], err_msg=name)


@pytest.mark.parametrize("family", quick(FAMILIES, ["deepseek_v3"], ["gpt_oss"]))
def test_peft_loads_and_merges_what_an_uneven_plan_writes(family: str, tmp_path: Path) -> None:
    check_files(family, Lora(2, 3.0, of_family(family, TARGETS), rslora=family == "mixtral"), tmp_path)


@pytest.mark.parametrize("family", quick(("qwen2_moe", "qwen3_moe", "deepseek_v3", "nemotron_h"), ["deepseek_v3"]))
@pytest.mark.parametrize("targets", quick((TARGETS, ("gate_proj",)), [TARGETS]))
def test_dora_of_experts_that_are_modules(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Beside dense layers and shared experts, whose projections have the same names."""
    check_files(family, Lora(2, 3.0, of_family(family, targets), dora=True), tmp_path)


def of_family(family: str, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Without gates, up instead."""
    if family != "nemotron_h":
        return targets
    return tuple(dict.fromkeys("up_proj" if name == "gate_proj" else name for name in targets))


def check_files(family: str, lora: Lora, tmp_path: Path) -> None:
    config = MODELS[family]
    model, base = make_hf(config, 3)
    spec = adapted(base, lora)
    weights = {n: t.detach().clone().numpy() for n, t in hf_to_logical(model, base).items()}
    values = weights | adapter_values(spec, 3)
    experts = [{"ranks": [2, [0, 1]], "experts": [[0, 1], [1, base.moe.num_experts]], "split": [[1], [2, 1]]}]
    last = base.num_layers - 1
    stages = stage([0, 1, 2], [0, last], tp=3, experts=experts), stage([3], [last, last + 1])
    made = plan_from_dict(plan([pipe(3, 1, *stages)]), spec)
    ranks = shared_pool().run(run_rank, made, spec, values, str(tmp_path / "ours"))
    assert_equal(read(tmp_path / "ours", spec), values)
    wrapped = peft_model(model, spec, values)
    wanted = logits(wrapped)
    fresh = make_hf(config, 3)[0]
    if lora.dora:
        keep_single_experts(fresh, spec)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours")
    np.testing.assert_allclose(logits(loaded), wanted, rtol=1e-10, atol=1e-12)
    wrapped.save_pretrained(tmp_path / "theirs")
    assert_equal(read(tmp_path / "theirs", spec), values)
    merged_model = wrapped.merge_and_unload()
    if lora.dora:
        keep_fused_experts(merged_model, make_hf(config, 3)[0])
    whole = {n: t.detach().numpy() for n, t in hf_to_logical(merged_model, base).items()}
    seen = 0
    for name, box, part in (piece for rank in ranks for piece in rank):
        np.testing.assert_allclose(part, whole[name][box.slices()], rtol=0, atol=1e-12, err_msg=name)
        seen += part.size
    assert seen == sum(t.size for t in whole.values())
    name = f"model.layers.1.mlp.experts.{lora.targets[-2:][0]}.weight"
    assert not np.allclose(whole[name], weights[name], atol=1e-3)


def test_dora_of_mixtrals_experts_has_the_released_names(tmp_path: Path) -> None:
    """``block_sparse_moe.experts.3.w1``, as in transformers 4, where alone peft knows such adapters."""
    _, base = make_hf(MOE_FAMILIES["mixtral"], 4)
    spec = adapted(base, Lora(2, 3.0, ("gate_proj", "down_proj"), dora=True))
    values = adapter_values(spec, 4)
    made = plan_from_dict(plan([pipe(1, 1, stage([0], [0, 2]))]), spec)
    weights = {t.name: np.zeros(t.shape) for t in logical_tensors(spec.base)}
    shared_pool().run(run_rank, made, spec, weights | values, str(tmp_path / "ours"))
    stored = load_file(tmp_path / "ours" / WEIGHTS)
    kinds = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    names = {"gate_proj": "w1", "down_proj": "w2"}
    place = "base_model.model.model.layers.{}.block_sparse_moe.experts.{}.{}.{}"
    assert stored.keys() == {
        place.format(i, e, name, kind) for i in range(2) for e in range(4) for name in names.values() for kind in kinds
    }
    for (ours, theirs), kind in itertools.product(names.items(), kinds):
        value = values[f"model.layers.1.mlp.experts.{ours}.{kind.removesuffix('.weight')}.weight"][3]
        np.testing.assert_array_equal(stored[place.format(1, 3, theirs, kind)].numpy(), value)
    said = json.loads((tmp_path / "ours" / CONFIG).read_text())
    assert said["use_dora"] and said["target_modules"] == ["w1", "w2"] and "target_parameters" not in said


def test_dora_of_experts_that_never_were_modules_has_no_file(tmp_path: Path) -> None:
    spec = adapted(from_hf_config(MOE_FAMILIES["gpt_oss"]), Lora(2, 2.0, ("down_proj",), dora=True))
    with pytest.raises(UserError, match=r"no modules of single experts.*--merge-lora"):
        save_adapter(str(tmp_path / "new"), spec, [], torch.float32, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", quick(WITH_MODULES, ["mixtral"]))
def test_adapters_of_single_experts_are_read(family: str, tmp_path: Path) -> None:
    """As they were written for transformers 4, where every expert has modules of its own."""
    model, base = make_hf(MOE_FAMILIES[family], 4)
    spec = adapted(base, Lora(2, 3.0, TARGETS))
    values, theirs = adapter_values(spec, 4), {}
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if family == "mixtral" else {}
    for tensor in trained_tensors(spec):
        parts = [tensor] if not tensor.per_expert else [expert_tensor(tensor, e) for e in range(tensor.shape[0])]
        for part, value in zip(parts, values[tensor.name] if tensor.per_expert else [values[tensor.name]], strict=True):
            name = part.name.replace("mlp", "block_sparse_moe") if family == "mixtral" else part.name
            for ours, other in names.items():
                name = name.replace(ours, other)
            theirs[f"base_model.model.{name}"] = torch.from_numpy(value.copy())
    save_file(theirs, tmp_path / WEIGHTS)
    targets = [names.get(name, name) for name in TARGETS]
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3.0, "target_modules": targets}
    (tmp_path / CONFIG).write_text(json.dumps(said))
    assert_equal(read(tmp_path, spec), values)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path)
    np.testing.assert_allclose(
        logits(loaded), logits(peft_model(make_hf(MOE_FAMILIES[family], 4)[0], spec, values)), rtol=1e-10, atol=1e-12
    )


def test_gate_and_up_may_have_one_a(tmp_path: Path) -> None:
    """What peft trains where target_parameters names the parameter of both, and nothing else is said."""
    model, base = make_hf(MOE_FAMILIES["qwen3_moe"], 5)
    spec = adapted(base, Lora(2, 3.0, ("gate_proj", "up_proj")))
    config = peft.LoraConfig(r=2, lora_alpha=3.0, target_modules=[], target_parameters=["experts.gate_up_proj"])
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if "lora_" in name:
                param.normal_(0, 0.2)
    wanted = logits(wrapped)
    wrapped.save_pretrained(tmp_path)
    again = peft_model(make_hf(MOE_FAMILIES["qwen3_moe"], 5)[0], spec, read(tmp_path, spec))
    np.testing.assert_allclose(logits(again), wanted, rtol=1e-10, atol=1e-12)


def test_ranks_of_gate_that_count_for_up_are_refused(tmp_path: Path) -> None:
    model, base = make_hf(MOE_FAMILIES["mixtral"], 6)
    spec = adapted(base, Lora(2, 3.0, ("gate_proj", "up_proj")))
    wrapped = peft_model(model, spec, adapter_values(spec, 6))
    wrapped.save_pretrained(tmp_path)
    AdapterWeights(str(tmp_path), spec)
    stored = load_file(tmp_path / WEIGHTS)
    name = next(n for n in stored if "lora_B" in n)
    stored[name][0, -1] = 1.0  # gate's first output, up's last rank
    save_file(stored, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=r"ranks of gate_proj.*up_proj"):
        AdapterWeights(str(tmp_path), spec)


@pytest.mark.parametrize(("change", "field"), [
    ({"target_parameters": ["mlp.router.weight"]}, "target_parameters"),
    ({"target_parameters": "down_proj"}, "target_parameters"), ({"use_dora": True}, "target_parameters"),
    ({"rank_pattern": {"gate_up_proj": 3}}, "rank_pattern"),
    ({"rank_pattern": {".*\\.gate_up_proj": 4}}, "alpha_pattern"),
    ({"alpha_pattern": {"experts.*": 5}}, "alpha_pattern"),
    ({"exclude_modules": ".*experts"}, "exclude_modules"),
    ({"target_modules": ["q_proj", "experts.0.up_proj"], "layers_to_transform": [1]}, "layers_to_transform"),
])  # fmt: skip
def test_other_parameters_and_ranks_are_refused(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    said |= {"target_parameters": ["mlp.experts.gate_up_proj"]} | change
    (tmp_path / CONFIG).write_text(json.dumps(said))
    with pytest.raises(UserError) as raised:
        read_config(str(tmp_path), "x", from_hf_config(MOE_FAMILIES["qwen3_moe"]))
    assert raised.value.field == field


def test_attention_beside_experts_has_layers_and_ranks_of_its_own(tmp_path: Path) -> None:
    """peft finds the same adapters by the file that is read and by the one that is written."""
    hf, plain = make_hf(MOE_FAMILIES["qwen3_moe"], 3)
    said = {"r": 2, "lora_alpha": 3.0, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]}
    said |= {"rank_pattern": {"o_proj": 3}, "target_parameters": ["mlp.experts.down_proj"]}
    peft.LoraConfig(**said).save_pretrained(tmp_path)
    spec = adapted(plain, read_config(str(tmp_path), "x", plain))
    assert spec.lora is not None and spec.lora.site_words() == ("1:q_proj:2", "1:o_proj:3")
    theirs = peft.get_peft_model(hf, peft.LoraConfig(**said))
    wanted = {name: tuple(p.shape) for name, p in theirs.named_parameters() if "lora_" in name}
    assert len(wanted) == 2 * len([t for t in trained_tensors(spec) if t.name.endswith("lora_A.weight")])
    written = {k: v for k, v in adapter_config(spec, None).items() if k not in ("peft_type", "inference_mode")}
    again = peft.get_peft_model(make_hf(MOE_FAMILIES["qwen3_moe"], 3)[0], peft.LoraConfig(**written))
    assert {name: tuple(p.shape) for name, p in again.named_parameters() if "lora_" in name} == wanted


def test_experts_know_no_dropout() -> None:
    with pytest.raises(UserError, match="no dropout"):
        adapted(from_hf_config(MOE_FAMILIES["mixtral"]), Lora(2, 2.0, ("q_proj", "down_proj"), dropout=0.1))


def test_gate_without_up_is_no_adapter_of_peft(tmp_path: Path) -> None:
    spec = adapted(from_hf_config(MOE_FAMILIES["mixtral"]), Lora(2, 2.0, ("gate_proj",)))
    with pytest.raises(UserError, match="one parameter"):
        save_adapter(str(tmp_path / "new"), spec, [], torch.float32, None, None)  # type: ignore[arg-type]
