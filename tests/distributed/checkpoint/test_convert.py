"""Hugging Face -> native -> any plan, and back: bit for bit, and what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hetero_megatron.checkpoint.native import open_checkpoint
from hetero_megatron.checkpoint.state import load_tensors
from hetero_megatron.cli.main import main
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.spec import ModelSpec, load_model
from tests.distributed.checkpoint.test_checkpoint import build, start, steps
from tests.distributed.checkpoint.test_checkpoint import save as save_native
from tests.distributed.checkpoint.test_hf_load import MODELS, PLANS, save
from tests.support.hf_reference import hf_loss_sum, make_exact
from tests.support.parity import Case, RandomSamples, fixed_case
from tests.support.pool import shared_pool
from tests.support.selection import quick


def convert(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()  # what transformers' imports print
    code = main(["convert", *words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)  # type: ignore[no-any-return]


def evaluate(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, wrong: Any, path: str) -> tuple[float, int] | None:
    runtime = build(comm, case, plan, spec, wrong)
    if runtime is None:
        return None
    assert runtime.optimizer is not None
    checkpoint = open_checkpoint(path, runtime.world)
    assert checkpoint is not None
    load_tensors(checkpoint, runtime.optimizer, spec, runtime.world, False)
    return runtime.evaluate(RandomSamples(case, spec.vocab_size).fetch, 0, plan.global_batch_size)


@pytest.mark.parametrize("name", quick(MODELS, ["llama tied", "gpt2"], ["qwen3"]))
def test_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "in", name, shards=True)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    done = convert(capsys, str(tmp_path / "in"), str(tmp_path / "native"))
    assert done["direction"] == "hf to native" and done["dtype"] == "fp64"
    spec = load_model(str(tmp_path / "in"))
    for spelled in PLANS.values():
        case = fixed_case(MODELS[name], spelled)
        batch = RandomSamples(case, spec.vocab_size).fetch(range(spelled["global_batch_size"]))
        want = hf_loss_sum(model, batch.tokens, batch.labels, batch.positions, None, None).item()
        _, _, wrong = start(case)
        plan = plan_from_dict(spelled, spec)
        for seen in shared_pool().run(evaluate, case, plan, spec, wrong, str(tmp_path / "native"))[: case.ranks]:
            assert seen[0] == pytest.approx(want, rel=1e-12)
    convert(capsys, str(tmp_path / "native"), str(tmp_path / "out"))
    assert_same(model, tmp_path / "out", torch.float64)
    for name_of_file in ("tokenizer.json", "generation_config.json"):
        written = (tmp_path / "out" / name_of_file).read_text()
        assert written == (tmp_path / "in" / name_of_file).read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 5
    check_logits(name, tmp_path, capsys)


def assert_same(model: torch.nn.Module, directory: Path, dtype: torch.dtype) -> None:
    back = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    for (name_a, a), (name_b, b) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert name_a == name_b and torch.equal(a.to(dtype), b)


def check_logits(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fp32: transformers gives the same logits from what it wrote and from what we made of it."""
    save(tmp_path / "in32", name, torch.float32)
    convert(capsys, str(tmp_path / "in32"), str(tmp_path / "native32"))
    convert(capsys, str(tmp_path / "native32"), str(tmp_path / "out32"), "--dtype", "fp32")
    tokens = torch.arange(12).view(1, 12) % 37
    logits = []
    for directory in ("in32", "out32"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / directory, dtype=torch.float32)
        model.config._experts_implementation = "eager"  # torch's grouped product wants rows of 16 bytes
        logits.append(model(tokens).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


def trained(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: Any, path: str) -> list[Any] | None:
    """Train, save; the weights this rank holds."""
    runtime = build(comm, case, plan, spec, initial)
    if runtime is None:
        return None
    steps(runtime, case, plan.global_batch_size, 0, 2)
    group = runtime.comm.background_group(plan.ranks)
    assert group is not None
    save_native(runtime, path, 2, asynchronous=False)
    return [(n, runtime.stage_model.boxes[n], p.detach().clone()) for n, p in runtime.sync.params.items()]


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_trained_checkpoint_becomes_a_hugging_face_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.hf_reference import hf_to_logical

    spelled = PLANS["pipelines"]
    case = fixed_case(MODELS[name], spelled)
    spec, initial, _ = start(case)
    plan = plan_from_dict(spelled, spec)
    seen = shared_pool().run(trained, case, plan, spec, initial, str(tmp_path / "run"))
    assert convert(capsys, str(tmp_path / "run"), str(tmp_path / "out"))["step"] == 2
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    whole = hf_to_logical(back, spec)
    for held in seen[: case.ranks]:
        for tensor, box, values in held:
            assert torch.equal(whole[tensor][box.slices()], values)


def third_step(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, wrong: Any, path: str) -> Any:
    runtime = build(comm, case, plan, spec, wrong)
    if runtime is None:
        return None
    assert runtime.optimizer is not None
    checkpoint = open_checkpoint(path, runtime.world)
    assert checkpoint is not None
    load_tensors(checkpoint, runtime.optimizer, spec, runtime.world, True)
    return steps(runtime, case, plan.global_batch_size, 2, 1)[0]


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_transformers_trains_on(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps here, exported; the third one's loss and gradient norm are the same here and there."""
    spelled = PLANS["pipelines"]
    case = fixed_case(MODELS[name], spelled)
    spec, initial, wrong = start(case)
    plan, path = plan_from_dict(spelled, spec), str(tmp_path / "run")
    shared_pool().run(trained, case, plan, spec, initial, path)
    loss, norm = shared_pool().run(third_step, case, plan, spec, wrong, path)[0]
    convert(capsys, path, str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64, attn_implementation="sdpa")
    make_exact(model, torch.float64)
    size = plan.global_batch_size
    batch = RandomSamples(case, spec.vocab_size).fetch(range(2 * size, 3 * size))
    total = hf_loss_sum(model, batch.tokens, batch.labels, batch.positions, None, None) / batch.tokens.numel()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-11)
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)), rel=1e-10)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere", "out"], "is no directory, and cannot be had from the Hugging Face hub"),
        (["empty", "out"], "holds no model"),
        (["in"], "takes two directories, not 1"),
        (["in", "in"], "not an empty directory"),
        (["in", "out", "--dtype", "int3"], "--dtype = int3"),
        (["in", "out", "--ckpt-step", "3"], "no step of SOURCE"),
        (["in", "out", "--dtpe"], "unknown flag"),
    ],
)
def test_refusals(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "in", "llama")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_source_is_named_as_the_word_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "in", next(iter(MODELS)))
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "native")]) == 2
    assert f"SOURCE = {file}: cannot be read" in capsys.readouterr().err and not (tmp_path / "native").exists()


def test_a_target_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "in", "llama")
    convert(capsys, str(tmp_path / "in"), str(tmp_path / "native"))
    target = str(tmp_path / "in" / "config.json" / "out")
    for source in ("in", "native"):
        assert main(["convert", str(tmp_path / source), target]) == 2
        assert f"TARGET = {target}: cannot be" in capsys.readouterr().err


def test_a_directory_named_like_a_preset_is_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    with pytest.raises(UserError, match="SOURCE = tiny: holds no config.json"):
        load_model("tiny", "SOURCE")
    assert load_model("tiny").name == "tiny"
