"""Hugging Face weights in: any plan computes what transformers computes, reading only its slices."""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import shutil
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.cli.configure import configure
from hetero_megatron.comm import Comm
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import ModelSpec, load_model, logical_tensors
from hetero_megatron.training.runtime import Runtime
from tests.support.hf_reference import hf_loss_sum, hf_to_logical, make_hf
from tests.support.moe_models import MOE_FAMILIES
from tests.support.parity import RandomSamples, fixed_case
from tests.support.pool import PRELOAD, shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 24, "n_head": 6, "vocab_size": 37, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama tied": LLAMA | {"tie_word_embeddings": True},
    "llama3 scaled": LLAMA
    | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 16}},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 4},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 4},
    "gpt2": GPT2,
    # All experts in one tensor, gate and up row by row; and heads of unlike sizes beside what no rank cuts.
    "gpt_oss": MOE_FAMILIES["gpt_oss"] | {"num_hidden_layers": 3},
    "deepseek_v3": MOE_FAMILIES["deepseek_v3"],
}  # fmt: skip
PLANS = {
    "one rank": plan([pipe(2, 2, stage([0], [0, 3]))]),
    "uneven tp": plan([pipe(2, 2, stage([0, 1, 2], [0, 3], tp=3, tp_split=[1, 3, 2]))]),
    "pipelines": plan([pipe(2, 1, stage([0, 1], [0, 2], tp=2), stage([2], [2, 3])), pipe(1, 2, stage([3], [0, 3]))]),
}


def save(directory: Path, name: str, dtype: torch.dtype = torch.float64, shards: bool = False) -> torch.nn.Module:
    model, _ = make_hf(MODELS[name], seed=3, dtype=dtype)
    model.save_pretrained(directory, max_shard_size="4KB" if shards else "5GB")  # type: ignore[operator]
    return model


def evaluate(comm: Comm, chosen: Plan, spec: ModelSpec, directory: str, case: Any) -> tuple[float, int] | None:
    compiled = CompiledPlan(chosen, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in chosen.ranks:
        return None
    weights = HFWeights(directory, spec)
    runtime = Runtime(compiled, comm, torch.float64, weights.read, None)
    return runtime.evaluate(RandomSamples(case, spec.vocab_size).fetch, 0, chosen.global_batch_size)


@pytest.mark.parametrize("name", quick(MODELS, ["llama tied", "gpt2"], ["qwen3"]))
def test_any_plan_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, name, shards=True)
    assert (tmp_path / "model.safetensors.index.json").exists()
    spec = load_model(str(tmp_path))
    for spelled in PLANS.values():
        case = fixed_case(MODELS[name], spelled)
        batch = RandomSamples(case, spec.vocab_size).fetch(range(spelled["global_batch_size"]))
        want = hf_loss_sum(model, batch.tokens, batch.labels, batch.positions, None, None).item()
        results = shared_pool().run(evaluate, plan_from_dict(spelled, spec), spec, str(tmp_path), case)
        for loss, tokens in results[: case.ranks]:
            assert loss == pytest.approx(want, rel=1e-12) and tokens == batch.tokens.numel()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_boxes_are_slices_of_the_saved_tensors(name: str, tmp_path: Path) -> None:
    """bf16 files; GPT-2 also without the prefix, as on the hub."""
    model = save(tmp_path, name, torch.bfloat16)
    spec = load_model(str(tmp_path))
    whole = hf_to_logical(model, spec)
    if name == "gpt2":
        from safetensors.torch import load_file, save_file

        file = tmp_path / "model.safetensors"
        save_file({n.removeprefix("transformer."): t for n, t in load_file(file).items()}, file)
    weights = HFWeights(str(tmp_path), spec)
    for tensor in logical_tensors(spec):
        lo = tuple(n // 3 for n in tensor.shape)
        hi = tuple(n - n // 4 for n in tensor.shape)
        box = Box(lo, hi)
        assert torch.equal(weights.read(tensor, box), whole[tensor.name][box.slices()])


def damage(directory: Path, kind: str) -> None:
    file, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-50])
    elif kind == "not safetensors":
        file.write_text("hello")
    elif kind == "pickle only":
        file.rename(directory / "pytorch_model.bin")
    elif kind == "bad index":
        file.unlink()
        index.write_text("[]")
    elif kind == "missing shard":
        file.unlink()
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}))
    elif kind == "empty":
        shutil.rmtree(directory)
        directory.mkdir()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "cannot be read"),
        ("not safetensors", "cannot be read"),
        ("pickle only", "cannot be read: not a file of tensors"),
        ("bad index", "not a JSON object"),
        ("missing shard", "cannot be read, which model.safetensors.index.json names: No such file"),
        ("empty", "holds none of"),
    ],
)
def test_damaged_directories_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    save(tmp_path / "model", "llama")
    spec = load_model(str(tmp_path / "model"))
    damage(tmp_path / "model", kind)
    with pytest.raises(UserError, match=message) as caught:
        HFWeights(str(tmp_path / "model"), spec)
    assert caught.value.field == "--load-hf" and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("shards", [False, True])
def test_bin_files_are_read_without_executing_anything(shards: bool, tmp_path: Path) -> None:
    model = save(tmp_path, "llama tied", torch.bfloat16)
    (tmp_path / "model.safetensors").unlink()
    state = dict(model.state_dict())
    if shards:
        names = sorted(state)
        files = {f"pytorch_model-{i}.bin": {n: state[n] for n in names[i::2]} for i in range(2)}
        index = {"weight_map": {n: file for file, part in files.items() for n in part}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        files = {"pytorch_model.bin": state}
    for file, part in files.items():
        torch.save(part, tmp_path / file)
    spec = load_model(str(tmp_path))
    weights, whole = HFWeights(str(tmp_path), spec), hf_to_logical(model, spec)
    for tensor in logical_tensors(spec):
        assert torch.equal(weights.read(tensor, Box.whole(tensor.shape)), whole[tensor.name])
        assert weights.dtype(tensor) == torch.bfloat16
    for file in files:
        torch.save({"lm_head.weight": print}, tmp_path / file)
    with pytest.raises(UserError, match="cannot be read.*: not a file of tensors"):
        HFWeights(str(tmp_path), spec)


def test_all_misfits_are_listed_at_once(tmp_path: Path) -> None:
    save(tmp_path / "qwen", "qwen2")
    save(tmp_path / "llama", "llama")
    with pytest.raises(UserError) as caught:
        HFWeights(str(tmp_path / "qwen"), load_model(str(tmp_path / "llama")))
    assert str(caught.value).count("unexpected model.layers.") == 9
    with pytest.raises(UserError, match=r"missing .*q_proj.bias \[24\].*; missing"):
        HFWeights(str(tmp_path / "llama"), load_model(str(tmp_path / "qwen")))


# Memory

WIDE = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 4}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 4}
MIB = 1 << 20


def anonymous_bytes() -> int:
    """Memory of this process that is no page of a file: what importing costs the host."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def import_as(rank: int, directory: str, spelled: dict[str, Any], pipe: Connection) -> None:
    """In a process of its own: (bytes above those before, bytes of the shard, bytes of its largest slice)."""
    spec = load_model(directory)
    chosen, slices, peak, done = plan_from_dict(spelled, spec), [0], [0], threading.Event()

    def look() -> None:
        while not done.wait(2e-4):
            peak[0] = max(peak[0], anonymous_bytes())

    def build(read: Callable[..., torch.Tensor]) -> Runtime:
        comm, compiled = FakeComm(rank, torch.device("cpu")), CompiledPlan(chosen, spec)
        comm.create_groups(compiled.groups)
        return Runtime(compiled, comm, torch.float32, read, None)

    build(lambda tensor, box: torch.zeros(()))  # whatever building makes torch import or allocate once
    weights = HFWeights(directory, spec)

    def read(tensor: Any, box: Box) -> torch.Tensor:
        values = weights.read(tensor, box)
        slices.append(4 * math.prod(box.shape))
        peak[0] = max(peak[0], anonymous_bytes())
        return values

    sys.setswitchinterval(1e-4)
    before = anonymous_bytes()
    watcher = threading.Thread(target=look)
    watcher.start()
    runtime = build(read)
    done.set()
    watcher.join()
    shard = sum(p.numel() * p.element_size() for p in runtime.stage_model.module.parameters())
    pipe.send((peak[0] - before, shard, max(slices)))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_rank_holds_its_shard_and_one_slice_while_it_imports(tmp_path: Path) -> None:
    model, _ = make_hf(WIDE, seed=3, dtype=torch.float32)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    spelled = plan([pipe(1, 1, stage([0, 1, 2, 3], [0, 4], tp=4, tp_split=[1, 1, 1, 1]))])
    here, there = mp.Pipe()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=import_as, args=(1, str(tmp_path), spelled, there))
    process.start()
    grown, shard, largest = here.recv()
    process.join()
    assert shard < 0.3 * whole and largest < 0.06 * whole  # otherwise this proves nothing
    assert grown <= shard + largest + 3 * MIB, (grown / MIB, shard / MIB, largest / MIB, whole / MIB)


# Names


def test_a_model_is_found_by_its_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's cache: no test may reach for a network."""
    import huggingface_hub.constants

    snapshot = tmp_path / "models--some--llama" / "snapshots" / ("a" * 40)
    save(snapshot, "llama")
    (tmp_path / "models--some--llama" / "refs").mkdir()
    (tmp_path / "models--some--llama" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    flags = "--mock-data --seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --load-hf"
    config = configure([*flags.split(), "some/llama"], {})
    assert config.load_hf is not None and Path(config.load_hf).resolve() == snapshot.resolve()
    HFWeights(config.load_hf, config.spec)
    with pytest.raises(UserError, match="is no directory, and cannot be had from the Hugging Face hub"):
        configure([*flags.split(), "some/other"], {})
