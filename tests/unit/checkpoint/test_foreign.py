"""Checkpoints of other programs are named, with what can be done, wherever a directory of ours is expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_megatron.cli import convert
from hetero_megatron.errors import UserError
from hetero_megatron.spec.foreign_checkpoints import refuse_foreign
from tests.distributed.checkpoint.test_save_directory import RUN
from tests.support.programs import inside
from tests.support.tiny_checkpoint import load, save

MEGATRON = ("Megatron-LM", "hetero-megatron convert")
# what is recognised -> files, by their paths (a directory's name ends with "/")
FOREIGN: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "torch": (MEGATRON, ["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"]),
    "no tracker": (MEGATRON, ["iter_0000010/mp_rank_00/model_optim_rng.pt"]),
    "pipelines": (MEGATRON, ["release/mp_rank_01_003/model_optim_rng.pt"]),
    "one step": (MEGATRON, ["mp_rank_00_000/model_rng.pt", "mp_rank_00_000/distrib_optim.pt"]),
    "torch_dist": (MEGATRON, [f"iter_0000010/{n}" for n in (".metadata", "__0_0.distcp", "common.pt")]),
    "torch_dist step": (MEGATRON, [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]),
    "sharded backend only": (MEGATRON, ["iter_0000010/metadata.json"]),
    "fsdp": (MEGATRON, ["iter_0000010/.metadata", "iter_0000010/__0_0.distcp"]),
    "NeMo": (MEGATRON, ["weights/common.pt", "weights/metadata.json", "context/model.yaml"]),
    "deepspeed": (("DeepSpeed", "zero_to_fp32"), ["latest", "global_step10/mp_rank_00_model_states.pt"]),
    "zero": (("DeepSpeed",), ["global_step9/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]),
    "torchtitan": (("torch.distributed.checkpoint",), ["step-100/.metadata", "step-100/__0_0.distcp"]),
    "fsdp script": (("torch.distributed.checkpoint",), [".metadata", "__0_0.distcp"]),
    "nanotron": (("nanotron",), ["10/checkpoint_metadata.json", "10/model/", "latest.txt"]),
    "hugging face": (("Hugging Face directory", "--load-hf"), ["config.json", "model-00001-of-00002.safetensors"]),
    "Trainer": (
        ("directory of Hugging Face checkpoints", "--load-hf"),
        ["checkpoint-500/config.json", "checkpoint-500/model.safetensors", "checkpoint-500/optimizer.pt"],
    ),
    "unsharded steps": (("pickled",), ["step1000-unsharded/model.pt", "config.yaml"]),
    "meta": (("pickled",), ["consolidated.00.pth", "params.json"]),
    "lightning": (("pickled",), ["checkpoint_epoch=3.ckpt"]),
}


def make(root: Path, files: list[str]) -> None:
    for name in files:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if path.name == "metadata.json":
            path.write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
        elif path.name == "latest":
            path.write_text("global_step10")
        elif not name.endswith("/"):
            path.write_bytes(b"\x80\x02")  # a pickle's beginning: nobody reads on


@pytest.mark.parametrize("name", FOREIGN)
def test_each_is_named(name: str, tmp_path: Path) -> None:
    said, files = FOREIGN[name]
    make(tmp_path, files)
    with pytest.raises(UserError) as refused:
        load(tmp_path)
    assert refused.value.field == "--load" and all(word in str(refused.value) for word in said), refused.value
    assert "damaged" not in str(refused.value)
    if name != "hugging face":
        with pytest.raises(UserError, match="SOURCE") as refused:
            convert.main([str(tmp_path), str(tmp_path / "out")])
        assert said == MEGATRON or all(word in str(refused.value) for word in said)
        assert not (tmp_path / "out").exists()


def test_ours_are_not(tmp_path: Path) -> None:
    """Nor is what people keep beside them; but one checkpoint is not the directory of all."""
    save(tmp_path, 3, 1)
    make(tmp_path, ["global_step9/mp_rank_00_model_states.pt"])
    assert load(tmp_path) is not None
    refuse_foreign(tmp_path / "none", "--load")
    with pytest.raises(UserError, match=r"is one checkpoint, not a directory of them.*--ckpt-step"):
        load(tmp_path / "iter_0000003")
    with pytest.raises(UserError, match="is not a directory"):
        load(tmp_path / "latest")


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
def test_a_run_refuses_them(flag: str, tmp_path: Path) -> None:
    make(tmp_path / "old", FOREIGN["torch"][1])
    _, err = inside([*RUN, "--train-iters", "1", flag, str(tmp_path / "old")], code=2)
    assert "is a Megatron-LM (or Megatron Core) checkpoint" in err and "Traceback" not in err and "damaged" not in err
