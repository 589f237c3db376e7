"""What waits between B_INPUT and W: the formula against the operands that the runtime holds (fake ones)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetero_megatron.cli.configure import configure
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.dry_run.one_rank import _batch
from hetero_megatron.ops.gemm import Product, WeightGradients
from hetero_megatron.plans import locate, stage_at, unit_at
from hetero_megatron.plans.memory.activations import RankWork, operand_bytes
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.training.kernels import shape_kernels
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.train import optimizer_factory
from tests.distributed.training.test_parity import pipe, plan, stage
from tests.support.families import DENSE
from tests.support.selection import quick

MODELS: dict[str, str | dict[str, Any]] = {
    "grouped": "--num-attention-heads 8 --num-query-groups 4 --group-query-attention --swiglu --ffn-hidden-size 96",
    "gelu": "--num-attention-heads 4 --ffn-hidden-size 96",
    "tied": "--num-attention-heads 4 --swiglu --ffn-hidden-size 80",
    "one norm": DENSE["cohere"] | {"num_hidden_layers": 5, "hidden_size": 64, "vocab_size": 128},
    "two norms": DENSE["gpt_neox"] | {"num_hidden_layers": 5, "hidden_size": 64, "vocab_size": 128},
}


def storages(products: Iterable[Product]) -> int:
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for p in products for t in (p.dy, p.x)}
    return sum(held.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16"])
@pytest.mark.parametrize("tp", quick([1, 2], [2]))
@pytest.mark.parametrize("recompute", quick(["none", "full"], ["full"], []))
@pytest.mark.parametrize("model", quick(MODELS, ["grouped", "one norm"]))
def test_operands_that_wait_are_what_the_formula_says(
    model: str, recompute: str, tp: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [list(range(s * tp, (s + 1) * tp)) for s in range(3)]
    layers = [[0, 2], [2, 3], [3, 5]]
    stages = [stage(r, part, tp=tp, recompute=recompute) for r, part in zip(ranks, layers, strict=True)]
    said = MODELS[model]
    if isinstance(said, str):
        flags = (
            "--dry-run --num-layers 5 --hidden-size 64 --vocab-size 128 --max-position-embeddings 64 --seq-length 16 "
            f"--normalization RMSNorm --disable-bias-linear --position-embedding-type rope {said} "
            + ("" if model == "tied" else "--untie-embeddings-and-output-weights")
        )
    else:
        (tmp_path / "config.json").write_text(json.dumps(said))
        flags = f"--dry-run --model {tmp_path} --seq-length 16"
    path = tmp_path / "plan.json"
    spelled: dict[str, Any] = plan([pipe(2, 3, *stages)], seq_length=16, schedule="zero-bubble")
    path.write_text(json.dumps(spelled))
    words = ["--plan", str(path), *flags.split(), *({"fp32": [], "bf16": ["--bf16"]}[dtype])]
    run = configure(words, {"WORLD_SIZE": str(3 * tp)})
    found: list[int] = []
    flush = WeightGradients.flush

    def watched(self: WeightGradients, waiting: Any = None) -> None:
        found.append(storages(waiting))
        flush(self, waiting)

    monkeypatch.setattr(WeightGradients, "flush", watched)
    for rank in run.plan.ranks[::tp]:
        found.clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            comm = FakeComm(rank, torch.device("cpu"))
            comm.create_groups(run.compiled.groups)
            runtime = Runtime(
                run.compiled, comm, DTYPES[run.dtype], lambda _, box: torch.empty(box.shape),
                optimizer_factory(run.optimizer), kernels=shape_kernels(run, rank, DTYPES[run.dtype]),
                options=RuntimeOptions(logits_bytes=run.logits_bytes),
            )  # fmt: skip
            runtime.executor.run(runtime.work(lambda ix: _batch(len(ix), 16), 0, run.plan.global_batch_size))
        place = locate(run.plan, rank)
        own, unit = stage_at(run.plan, place), unit_at(run.plan, place)
        held = RankWork(
            own.num_layers, own.embed, own.head, recompute, 0, unit.micro_batch_tokens, ITEM_BYTES[dtype], tp, tp
        )
        assert found == [operand_bytes(run.spec, held)] * 3
