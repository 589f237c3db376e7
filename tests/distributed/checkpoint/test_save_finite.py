"""Nothing that is not finite gets into a checkpoint, whichever rank and tensor it is in; the ones before stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.native import CheckpointSaver
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.optimizer import ShardedOptimizer
from tests.support.pool import shared_pool
from tests.support.programs import inside
from tests.support.tiny_checkpoint import alone, boxed, load, save, values

RUN = ["--model", "tiny", "--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--log-interval", "1"]

HALF = ["--fp16", "--loss-scale", "1"]  # masters that are large are no numbers in the weights' dtype


def refused(path: Path, step: int, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> str:
    saver = CheckpointSaver(str(path), alone(), keep=1, asynchronous=False, dtype=dtype)
    with pytest.raises(UserError) as caught:
        saver.save(step, boxed(tensors), {"step": step}, {}, lambda _: {"optimizer": None})
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.matrix", "model.vector", "optimizer.exp_avg.matrix"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_by_its_name(name: str, value: float, tmp_path: Path) -> None:
    save(tmp_path, 3, seed=3, keep=1)
    tensors = values(4)
    tensors[name].view(-1)[-1] = value
    said = refused(tmp_path, 4, tensors)
    assert f"the checkpoint of step 4 is not saved: NaN or Inf in {name} on rank 0" in said and "\n" not in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", "latest"]
    found = load(tmp_path)
    assert found is not None and found[0] == 3
    save(tmp_path, 5, seed=5, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", "latest"]


def test_a_master_that_is_infinite_in_the_dtype_of_the_run_is_refused(tmp_path: Path) -> None:
    """It would be read as an infinite weight, by every run that goes on from there; moments are used as they are."""
    tensors = values(1)
    tensors["optimizer.exp_avg.matrix"] *= 1e30
    tensors["model.vector"][1] = 65519.0  # rounds down to the largest
    CheckpointSaver(str(tmp_path), alone(), asynchronous=False, dtype=torch.float16).save(
        1, boxed(tensors), {"step": 1, "seed": 1}, {}, lambda _: {"optimizer": None}
    )
    tensors["model.vector"][1] = 65520.0
    assert "NaN or Inf in model.vector on rank 0" in refused(tmp_path, 2, tensors, torch.float16)
    assert (tmp_path / "iter_0000001").is_dir() and not (tmp_path / "iter_0000002").exists()


def saved_by(comm: Comm, path: str, bad: int | None) -> str:
    """One tensor of a row for every rank; ``bad``: whose row ends in NaN."""
    ranks = tuple(range(comm.launcher.world_size))
    comm.create_groups([ranks])
    group = comm.background_group(ranks)
    assert group is not None
    row = torch.full((1, 4), float(comm.rank))
    if comm.rank == bad:
        row[0, 3] = math.nan
    shape, box = (len(ranks), 4), Box((comm.rank, 0), (comm.rank + 1, 4))
    saver = CheckpointSaver(path, group, asynchronous=False)
    try:
        saver.save(1, {"model.rows": BoxedTensor(shape, [(box, row)])}, {"step": 1}, {}, lambda _: {})
    except UserError as error:
        return str(error)
    return ""


def test_every_rank_says_which_rank_it_was(tmp_path: Path) -> None:
    told = shared_pool().run(saved_by, str(tmp_path / "a"), 1)
    assert len(set(told)) == 1 and "NaN or Inf in model.rows on rank 1" in told[0]
    assert not list((tmp_path / "a").iterdir())
    assert not any(shared_pool().run(saved_by, str(tmp_path / "b"), None))


@pytest.mark.slow
def test_a_run_whose_update_is_not_finite_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = [*RUN, *HALF, "--save", str(path), "--save-interval", "1", "--keep-checkpoints", "1"]
    good = [*words, "--lr", "1e-3", "--train-iters", "4", "--lr-warmup-iters", "0", "--exit-interval", "2"]
    inside(good)
    spoil = ["--load", str(path), "--override-opt_param-scheduler", "--weight-decay", "1e6", "--lr", "1e6"]
    _, err = inside([*words, *spoil, "--train-iters", "3", "--save-hf", str(tmp_path / "hf")], code=2)
    assert "on rank 0" in err and err.count("error: ") == 1 and "Traceback" not in err
    assert sorted(p.name for p in path.glob("iter*")) == ["iter_0000002"] and not list(tmp_path.glob("hf*"))
    inside([*good, "--load", str(path), "--exit-interval", "3"])


def test_neither_exports_nor_adapters_are_written_of_what_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ShardedOptimizer.step

    def spoiled(self: ShardedOptimizer, *given: Any) -> None:  # as by a faulty kernel
        step(self, *given)
        for _, _, master in self.owned():
            master.view(-1)[-1:] = math.nan

    monkeypatch.setattr(ShardedOptimizer, "step", spoiled)
    once = [*RUN, "--lr", "1e-3", "--train-iters", "1"]
    _, err = inside([*once, "--save-hf", str(tmp_path / "hf")], code=2)
    assert "--save-hf" in err and "NaN or Inf in " in err and "on rank 0" in err
    _, err = inside([*once, "--lora-rank", "2", "--save-adapter", str(tmp_path / "adapter")], code=2)
    assert "--save-adapter" in err and "NaN or Inf in " in err and "on rank 0" in err
    assert not list(tmp_path.iterdir())
