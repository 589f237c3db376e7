"""Hugging Face weights out: from any plan, loadable by transformers, bit for bit where nothing was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.checkpoint.hf_save import save_hf
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.training.runtime import Runtime
from tests.distributed.checkpoint.test_hf_load import MODELS, PLANS, save
from tests.support.hf_reference import attention_of, hf_loss_sum, make_exact
from tests.support.parity import RandomSamples, build_optimizer, fixed_case
from tests.support.pool import shared_pool
from tests.support.selection import quick


def round_trip(
    comm: Comm, plan: Plan, spec: ModelSpec, source: str, target: str, case: Any, steps: int, dtype: torch.dtype
) -> tuple[float, int] | None:
    """Load, train, save; the evaluation after it."""
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return None
    runtime = Runtime(compiled, comm, torch.float64, HFWeights(source, spec).read, build_optimizer(case))
    fetch, size = RandomSamples(case, spec.vocab_size).fetch, plan.global_batch_size
    for step in range(steps):
        runtime.train_step(fetch, step * size, size, case.lr)
    assert runtime.optimizer is not None
    save_hf(target, spec, runtime.optimizer.owned(), dtype, runtime.world, source, shard_bytes=20_000)
    return runtime.evaluate(fetch, 0, size)


@pytest.mark.parametrize("name", quick(MODELS, ["llama tied"], ["gpt2", "qwen3"]))
def test_transformers_goes_on_with_what_we_trained(name: str, tmp_path: Path) -> None:
    save(tmp_path / "in", name)
    spec = load_model(str(tmp_path / "in"))
    for number, spelled in enumerate(PLANS.values()):
        case, target = fixed_case(MODELS[name], spelled), str(tmp_path / f"out{number}")
        plan = plan_from_dict(spelled, spec)
        results = shared_pool().run(round_trip, plan, spec, str(tmp_path / "in"), target, case, 1, torch.float64)
        attention = attention_of(MODELS[name])
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, attn_implementation=attention)
        model.config._experts_implementation = "eager"  # torch's grouped product knows no fp64
        make_exact(model, torch.float64)
        batch = RandomSamples(case, spec.vocab_size).fetch(range(plan.global_batch_size))
        want = hf_loss_sum(model, batch.tokens, batch.labels, batch.positions, None, None).item()
        assert results[0][0] == pytest.approx(want, rel=1e-12)
        assert replace(load_model(target), name=spec.name) == spec


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_untrained_weights_come_back_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save(tmp_path / "in", name)
    spec = load_model(str(tmp_path / "in"))
    spelled = PLANS["pipelines"]
    case, target = fixed_case(MODELS[name], spelled), tmp_path / "out"
    along = {"tokenizer.json": "{}", "generation_config.json": '{"temperature": 0.7, "do_sample": true}'}
    for name_of_file, text in along.items():
        (tmp_path / "in" / name_of_file).write_text(text)
    plan = plan_from_dict(spelled, spec)
    shared_pool().run(round_trip, plan, spec, str(tmp_path / "in"), str(target), case, 0, dtype)
    back = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    for (name_a, a), (name_b, b) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert name_a == name_b and torch.equal(a.to(dtype), b)
    assert {name_of_file: (target / name_of_file).read_text() for name_of_file in along} == along
    assert not target.with_name("out.incomplete").exists()


def test_an_existing_directory_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path / "in", "llama")
    spec = load_model(str(tmp_path / "in"))
    spelled = PLANS["one rank"]
    plan, case = plan_from_dict(spelled, spec), fixed_case(MODELS["llama"], spelled)
    with pytest.raises(Exception, match="not an empty directory") as caught:
        shared_pool().run(round_trip, plan, spec, str(tmp_path / "in"), str(tmp_path / "in"), case, 0, torch.float64)
    assert isinstance(caught.value, UserError | AssertionError)
