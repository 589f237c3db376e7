"""Export where ranks do not share a file system: every rank works in a directory of its own, the first one writes."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.checkpoint.hf_save import check_target, save_hf
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import ModelSpec, load_model, logical_tensors
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.runtime import Runtime
from tests.distributed.checkpoint.test_hf_load import MIB, MODELS, PLANS, WIDE, anonymous_bytes, save
from tests.support.parity import RandomSamples, build_optimizer, fixed_case
from tests.support.pool import RANKS, shared_pool

SHARD = 20_000
RENTED = range(4)  # ranks of the tests without a plan


@contextmanager
def node(root: str, rank: int) -> Iterator[Path]:
    """A place that no other rank sees by the relative names it uses."""
    before, place = os.getcwd(), Path(root) / f"node{rank}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    try:
        yield place
    finally:
        os.chdir(before)


def export_twice(
    comm: Comm, plan: Plan, spec: ModelSpec, root: str, case: Any, dtype: torch.dtype
) -> tuple[int, int] | None:
    """Load, train a step, save to one directory for all and to the own one; bytes (sent to the first rank, owned)."""
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return None
    source = f"{root}/in"
    runtime = Runtime(compiled, comm, torch.float64, HFWeights(source, spec).read, build_optimizer(case))
    size = plan.global_batch_size
    runtime.train_step(RandomSamples(case, spec.vocab_size).fetch, 0, size, case.lr)
    assert runtime.optimizer is not None
    owned = runtime.optimizer.owned
    save_hf(f"{root}/shared", spec, owned(), dtype, runtime.world, source, SHARD)
    sent = comm.sent_bytes[0]
    with node(root, comm.rank):
        check_target("out", spec, runtime.world)
        save_hf("out", spec, owned(), dtype, runtime.world, source, SHARD)
    return comm.sent_bytes[0] - sent, sum(box.size for _, box, _ in owned()) * dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("llama tied", torch.bfloat16), ("gpt2", torch.float64)])
@pytest.mark.parametrize("which", ["uneven tp", "pipelines"])
def test_the_files_are_those_of_a_shared_file_system(name: str, dtype: torch.dtype, which: str, tmp_path: Path) -> None:
    save(tmp_path / "in", name)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    spec = load_model(str(tmp_path / "in"))
    spelled = PLANS[which]
    plan = plan_from_dict(spelled, spec)
    done = shared_pool().run(export_twice, plan, spec, str(tmp_path), fixed_case(MODELS[name], spelled), dtype)
    bytes_of = {p.name: p.read_bytes() for p in (tmp_path / "shared").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "node0" / "out").iterdir()} == bytes_of
    assert sum(n.endswith(".safetensors") for n in bytes_of) > 1 and ".token" not in bytes_of
    assert os.listdir(tmp_path / "node0") == ["out"]
    for rank in plan.ranks[1:]:
        assert os.listdir(tmp_path / f"node{rank}") == []
        sent, owned = done[rank]
        assert sent == owned > 0  # every element once, in the dtype of the files
    assert done[0][0] == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "node0" / "out", dtype=dtype)
    weights = HFWeights(str(tmp_path / "shared"), spec)
    state = model.state_dict()
    for tensor in logical_tensors(spec):
        if tensor.name in state:  # GPT-2 calls and stores them otherwise
            assert torch.equal(state[tensor.name], weights.read(tensor, Box.whole(tensor.shape)))


# Without a plan: rank r of four owns the r-th quarter of the rows of everything.


def quarter(shape: tuple[int, ...], rank: int) -> Box:
    rows = shape[0]
    return Box.whole(shape).rows(rank * rows // len(RENTED), (rank + 1) * rows // len(RENTED))


def rows_of(spec: ModelSpec, rank: int) -> Iterator[tuple[str, Box, torch.Tensor]]:
    for number, tensor in enumerate(logical_tensors(spec)):
        box = quarter(tensor.shape, rank)
        yield tensor.name, box, torch.full(box.shape, 10.0 * number + rank)


def export_and_watch(comm: Comm, spec: ModelSpec, root: str) -> int | None:
    """Anonymous memory that saving took beyond what was there before."""
    comm.create_groups([RENTED])
    if comm.rank not in RENTED:
        return None
    owned, group = list(rows_of(spec, comm.rank)), comm.group(RENTED)
    peak, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(1e-3):
            peak[0] = max(peak[0], anonymous_bytes())

    interval = sys.getswitchinterval()
    with node(root, comm.rank):
        # What an export imports when it is the first one, 4 MiB, is none of its tensors'.
        small = replace(spec, vocab_size=8)
        save_hf("small", small, rows_of(small, comm.rank), torch.float32, group)
        gc.collect()
        before = anonymous_bytes()
        watcher = threading.Thread(target=look)
        try:
            sys.setswitchinterval(1e-4)
            watcher.start()
            save_hf("out", spec, owned, torch.float32, group)
        finally:
            done.set()
            watcher.join()
            sys.setswitchinterval(interval)
    return peak[0] - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_the_writer_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    spec = from_hf_config(WIDE)
    sizes = [4 * Box.whole(t.shape).size for t in logical_tensors(spec)]
    grown = shared_pool().run(export_and_watch, spec, str(tmp_path))
    assert sum(sizes) > 5 * max(sizes)  # otherwise this proves nothing
    assert all(g <= max(sizes) + 3 * MIB for g in grown[: len(RENTED)]), [g / MIB for g in grown[: len(RENTED)]]
    with safe_open(tmp_path / "node0" / "out" / "model.safetensors", framework="pt") as file:
        for number, tensor in enumerate(logical_tensors(spec)):
            found = file.get_tensor(tensor.name)
            for rank in RENTED:
                assert (found[quarter(tensor.shape, rank).slices()] == 10.0 * number + rank).all()


def fail(comm: Comm, spec: ModelSpec, root: str) -> list[str]:
    """What each rank is told when the first one's directory cannot be made, has no room, or is lost half-way."""
    comm.create_groups([RENTED])
    if comm.rank not in RENTED:
        return []
    group, rank, told = comm.group(RENTED), comm.rank, []

    def lost() -> Iterator[tuple[str, Box, torch.Tensor]]:
        yield from rows_of(spec, rank)
        if rank == 0:
            shutil.rmtree("lost.incomplete")

    def attempt(action: Any) -> None:
        try:
            action()
            told.append("")
        except UserError as error:
            told.append(str(error))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with node(root, rank):
        if rank == 0:
            Path("file").write_text("")
        attempt(lambda: check_target("file/out", spec, group))
        attempt(lambda: save_hf("file/out", spec, rows_of(spec, rank), torch.float32, group))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if rank == 0 else soft, hard))
            attempt(lambda: save_hf("full", spec, rows_of(spec, rank), torch.float32, group))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        attempt(lambda: save_hf("lost", spec, lost(), torch.float32, group))
        attempt(lambda: save_hf("full", spec, rows_of(spec, rank), torch.float32, group))  # the ranks are in step
    return told


def test_all_ranks_are_told_what_the_writer_met(tmp_path: Path) -> None:
    told = shared_pool().run(fail, from_hf_config(MODELS["llama"]), str(tmp_path))
    assert all(t == told[0] for t in told[: len(RENTED)]) and told[len(RENTED) :] == [[]] * (RANKS - len(RENTED))
    start, unwritable, full, lost, good = told[0]
    assert all(t.startswith("--save-hf = ") and ": Not a directory" in t for t in (start, unwritable))
    assert "--save-hf" in full and "cannot be written on rank 0: File too large" in full
    assert "--save-hf = lost.incomplete/model.safetensors: cannot be written on rank 0: No such file" in lost
    assert not good and os.listdir(tmp_path / "node0" / "full") and not (tmp_path / "node0" / "lost").exists()


def half_seen(comm: Comm, spec: ModelSpec, root: str) -> bool:
    """Three ranks work in one place, the fourth in another, where a directory of the same name is."""
    comm.create_groups([RENTED])
    if comm.rank not in RENTED:
        return False
    with node(root, 3 if comm.rank == 3 else 0):
        if comm.rank == 3:
            Path("out.incomplete").mkdir()
            Path("out.incomplete", ".token").write_bytes(b"\xffof another run")
        before = comm.sent_bytes[0]
        save_hf("out", spec, rows_of(spec, comm.rank), torch.float32, comm.group(RENTED))
        return comm.sent_bytes[0] > before


def test_one_rank_elsewhere_is_enough(tmp_path: Path) -> None:
    spec = from_hf_config(MODELS["llama"])
    assert shared_pool().run(half_seen, spec, str(tmp_path))[: len(RENTED)] == [False, True, True, True]
    with safe_open(tmp_path / "node0" / "out" / "model.safetensors", framework="pt") as file:
        for number, tensor in enumerate(logical_tensors(spec)):
            assert (file.get_tensor(tensor.name)[quarter(tensor.shape, 3).slices()] == 10.0 * number + 3).all()
    assert os.listdir(tmp_path / "node3") == ["out.incomplete"]
    assert (tmp_path / "node3" / "out.incomplete" / ".token").read_bytes() == b"\xffof another run"
