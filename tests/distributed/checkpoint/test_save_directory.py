"""A run never replaces checkpoints that it did not begin with, unless it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_megatron.checkpoint.directory import CheckpointDirectory
from tests.distributed.training.test_failures import start
from tests.support.programs import inside

RUN = ["--model", "tiny", "--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--lr", "1e-3"]
THREE_STEPS = [*RUN, "--train-iters", "3", "--save-interval", "1"]
TWO_OF_THREE = """
version: 1
seq_length: 16
global_batch_size: 2
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 0, layers: [0, 3]}, {ranks: 1, layers: [3, 6]}]}
"""


def content(directory: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --save directory with steps 1, 2 and 3."""
    path = tmp_path_factory.mktemp("trained") / "run"
    inside([*THREE_STEPS, "--save", str(path)])
    return path


@pytest.mark.parametrize("more", ["", "--load elsewhere", "--load {run} --finetune", "--pretrained-checkpoint {run}"])
def test_checkpoints_of_another_run_are_not_replaced(more: str, trained: Path) -> None:
    before = content(trained)
    out, err = inside([*THREE_STEPS, "--save", str(trained), *more.format(run=trained).split()], code=2)
    assert f"--save = {trained}: holds checkpoints already, the newest of step 3" in err
    assert f"--load {trained} to go on" in err and "--overwrite-checkpoints" in err
    assert ("without --finetune" in err) == ("--finetune" in more)
    assert content(trained) == before and "data:" not in out  # nothing was read, built or begun


def test_a_directory_that_the_run_goes_on_from_is_its_own(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(trained)  # another spelling
    out, _ = inside([*THREE_STEPS, "--save", str(trained), "--load", str(tmp_path / "link")])
    assert "step 3, 3 samples" in out and "notice: --save" not in out


def test_going_back_says_what_it_replaces(tmp_path: Path) -> None:
    words = [*THREE_STEPS, "--save", str(tmp_path), "--load", str(tmp_path)]
    inside(words)
    out, _ = inside([*words, "--ckpt-step", "1", "--exit-interval", "2"])
    assert f"notice: --save {tmp_path} holds newer checkpoints, up to step 3" in out


@pytest.mark.slow
def test_it_is_permitted_by_a_flag_or_by_saving_none(trained: Path, tmp_path: Path) -> None:
    before = content(trained)
    out, _ = inside([*RUN, "--train-iters", "1", "--save", str(trained), "--save-interval", "0"])
    assert all(p.read_bytes() == old for p, old in before.items() if "iter_" in str(p)) and "notice: --save" not in out
    inside([*THREE_STEPS, "--save", str(tmp_path)])
    out, _ = inside([*RUN, "--train-iters", "2", "--seed", "5", "--save", str(tmp_path), "--overwrite-checkpoints"])
    assert f"notice: --save {tmp_path} holds checkpoints already, the newest of step 3" in out
    assert (tmp_path / "latest").read_text().startswith("iter_0000002 ")


def test_all_ranks_refuse_and_idle_ones_do_not_wait(trained: Path) -> None:
    """Ranks without a launcher, which would end the others as soon as one has refused."""
    ranks = start(trained.parent, TWO_OF_THREE, 3, "--mock-data")
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    refused = [f"error: --save = {trained}: holds checkpoints already" in error for error in errors]
    assert refused == [True, True, False], errors
    assert [rank.returncode for rank in ranks] == [2, 2, 0], errors  # 3, had it waited in vain


def test_one_that_was_being_replaced_counts(tmp_path: Path) -> None:
    """A job that died between the renames left it as .old: it is the only copy."""
    (tmp_path / "iter_0000004.old").mkdir()
    (tmp_path / "iter_0000005.incomplete").mkdir()
    assert CheckpointDirectory(tmp_path).held() == [4] and CheckpointDirectory(tmp_path / "none").held() == []


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir", "--dump-layers", "--capture-operators"])
def test_other_outputs_are_refused_before_the_work(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    more = ["--save-interval", "0"] if flag == "--save" else []
    out, err = inside([*RUN, "--train-iters", "1", *more, flag, str(tmp_path / "file" / "x")], code=2)
    assert f"{flag} = {tmp_path}/file/x: cannot be written: Not a directory" in err and "data:" not in out
