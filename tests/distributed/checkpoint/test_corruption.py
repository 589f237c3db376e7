"""Whatever happens to a checkpoint's files is noticed, explained, and never spreads to older checkpoints."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.checkpoint.native import check_writable, open_checkpoint
from hetero_megatron.checkpoint.state import check_model
from hetero_megatron.cli.main import main
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.spec import ModelSpec, load_model
from tests.distributed.checkpoint.test_checkpoint import SEED, build, save, start, steps
from tests.distributed.checkpoint.test_checkpoint import random_case as any_case
from tests.support.parity import Case
from tests.support.pool import shared_pool


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of steps 1 and 2 that several ranks wrote."""
    path = tmp_path_factory.mktemp("two")
    case = next(c for c in (any_case(SEED + i) for i in range(100)) if c.ranks >= 4)
    spec, initial, _ = start(case)
    shared_pool().run(two_saves, case, plan_from_dict(case.plan, spec), spec, initial, str(path))
    return path


def two_saves(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: Any, path: str) -> None:
    runtime = build(comm, case, plan, spec, initial)
    if runtime is not None:
        for step in (1, 2):
            steps(runtime, case, plan.global_batch_size, step - 1, 1)
            save(runtime, path, step, asynchronous=False)


def damage(path: Path, how: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif how == "extend":
        path.write_bytes(content + b" ")
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["flip", "truncate", "extend", "delete"])
def test_damage_to_any_file_is_noticed(how: str, two: Path, tmp_path: Path) -> None:
    """The newest checkpoint is refused; with the option, the one before it is taken, and only then."""
    rng = random.Random(how)
    files = [p.relative_to(two) for p in two.rglob("*") if p.is_file() and "iter_0000001" not in p.parts]
    assert len(files) >= 4
    for number, file in enumerate(sorted(files) * (6 if how == "flip" else 1)):
        copy = tmp_path / str(number)
        shutil.copytree(two, copy)
        damage(copy / file, how, rng)
        with pytest.raises(UserError, match=r"damaged.*--load-previous-on-corruption") as caught:
            open_checkpoint(str(copy), None)
        said: list[str] = []
        found = open_checkpoint(str(copy), None, previous=True, log=said.append)
        assert found is not None and said, caught.value
        assert found.step == (2 if file.name == "latest" else 1)
        assert open_checkpoint(str(copy), None, step=1) is not None
        shutil.rmtree(copy)


@pytest.mark.parametrize("field", ["--load", "--pretrained-checkpoint", "SOURCE"])
def test_refusals_name_what_named_the_directory(field: str, two: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(two, copy)
    (copy / "iter_0000002" / "metadata.json").write_text("{}")
    with pytest.raises(UserError, match=f"^{field} = .*damaged: metadata.json") as caught:
        open_checkpoint(str(copy), None, field=field)
    assert ("--load-previous-on-corruption" in caught.value.accepted) == (field != "SOURCE")
    said: list[str] = []
    found = open_checkpoint(str(copy), None, previous=True, log=said.append, field=field)
    assert found is not None and found.field == field and said[0].startswith(f"notice: {field} ")
    with pytest.raises(UserError, match=f"^{field} = .*is a checkpoint of another model than tiny"):
        check_model(found, load_model("tiny"))
    (copy / "iter_0000001" / "metadata.json").unlink()
    with pytest.raises(UserError, match=f"^{field} = .*no checkpoint is good"):
        open_checkpoint(str(copy), None, previous=True, log=said.append, field=field)


def test_convert_names_its_source(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(two, tmp_path / "copy")
    (tmp_path / "copy" / "latest").write_text("iter_0000009 " + "0" * 64 + "\n")
    assert main(["convert", str(tmp_path / "copy"), str(tmp_path / "target")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: SOURCE = ") and "damaged: latest names iter_0000009" in err and "--load" not in err
    assert not (tmp_path / "target").exists()


def test_when_every_checkpoint_is_damaged_nothing_is_loaded(two: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(two, copy)
    for file in copy.glob("iter_*/metadata.json"):
        file.write_text("{}")
    with pytest.raises(UserError, match="no checkpoint is good"):
        open_checkpoint(str(copy), None, previous=True, log=lambda _: None)


def test_what_was_not_finished_is_not_a_checkpoint(two: Path, tmp_path: Path) -> None:
    """A job that dies while it writes leaves a directory that nobody reads, and the next save removes."""
    copy = tmp_path / "copy"
    shutil.copytree(two, copy)
    shutil.copytree(copy / "iter_0000002", copy / "iter_0000003.incomplete")
    found = open_checkpoint(str(copy), None)
    assert found is not None and found.step == 2
    # It died between the rename and `latest`: step 2 is there, but the run goes on from 1.
    shutil.copytree(two, tmp_path / "other")
    (tmp_path / "other" / "latest").write_text(f"iter_0000001 {sums_digest(two / 'iter_0000001')}\n")
    found = open_checkpoint(str(tmp_path / "other"), None)
    assert found is not None and found.step == 1


def sums_digest(directory: Path) -> str:
    import hashlib

    return hashlib.sha256((directory / "SHA256SUMS").read_bytes()).hexdigest()


def test_there_is_nothing_to_unpickle(two: Path) -> None:
    """No file begins like a pickle or a zip, and metadata and sums are text."""
    for path in (p for p in two.rglob("*") if p.is_file()):
        assert path.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"), path
        assert path.suffix == ".safetensors" or path.read_text().isprintable() or "\n" in path.read_text()


def full_disk(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: Any, path: str) -> str | None:
    """All ranks but the first may write no file of more than 64 bytes while step 3 is saved; step 4 is saved after."""
    runtime = build(comm, case, plan, spec, initial)
    if runtime is None:
        return None
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank != plan.ranks[0]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    said = ""
    try:
        save(runtime, path, 3).wait()
    except UserError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    steps(runtime, case, plan.global_batch_size, 0, 1)  # training itself is not hurt
    assert not Path(path, "iter_0000003").exists()
    save(runtime, path, 4, asynchronous=False)
    return said


def test_a_full_disk_is_told_to_all_ranks_and_older_checkpoints_stay(two: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(two, copy)
    before = {p: p.read_bytes() for p in copy.rglob("iter_0000002/*")}
    case = next(c for c in (any_case(SEED + i) for i in range(100)) if c.ranks >= 4)
    spec, initial, _ = start(case)
    said = shared_pool().run(full_disk, case, plan_from_dict(case.plan, spec), spec, initial, str(copy))
    for text in said[: case.ranks]:
        assert text and "cannot be written (File too large" in text and "older ones are untouched" in text
    assert all(p.read_bytes() == content for p, content in before.items())
    found = open_checkpoint(str(copy), None)
    assert found is not None and found.step == 4
    assert not list(copy.glob("*.incomplete"))


def refuses(comm: Comm, plan: Plan, path: str) -> str | None:
    if comm.rank not in plan.ranks:
        comm.create_groups([plan.ranks])
        return None
    comm.create_groups([plan.ranks])
    try:
        check_writable(path, comm.group(plan.ranks))
    except UserError as error:
        return str(error)
    return ""


def test_an_unwritable_directory_is_refused_before_training(tmp_path: Path) -> None:
    case = any_case(SEED)
    spec, _, _ = start(case)
    plan = plan_from_dict(case.plan, spec)
    (tmp_path / "file").write_text("")
    for said in shared_pool().run(refuses, plan, str(tmp_path / "file" / "run"))[: case.ranks]:
        assert said and "--save" in said and "cannot be written" in said
    assert not any(shared_pool().run(refuses, plan, str(tmp_path / "run")))
    assert os.listdir(tmp_path / "run") == []
