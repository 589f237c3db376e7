"""How many kernels a decoder layer launches on a device in forward and backward of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.dry_run.one_rank import _batch
from hetero_megatron.model import initial_values
from hetero_megatron.ops import Kernel, Registry, Signature, resolve, torch_registry
from hetero_megatron.ops.spec import VENDOR
from hetero_megatron.ops.stage import stage_signatures
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import shares
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.train import optimizer_factory

LENGTH = 8
# What the portable kernels launch: backward of a norm adds up its weight gradient in a second one, that of attention
# has one each for delta, for keys and values, and for queries. Products are aten's, and counted there.
NOTHING = {"_unsafe_view", "empty", "new_empty", "empty_like", "empty_strided"}
LAUNCHES = {"rms_norm": (1, 2), "add_rms_norm": (1, 2), "rope": (1, 1), "swiglu": (1, 1), "attention": (1, 3)}


class Launches(TorchDispatchMode):
    """Counts what runs on a device: kernels of operators, and torch's own but for views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.inside = Counter[str](), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not (self.inside or function.is_view or function._schema.name.split("::")[1] in NOTHING):
            self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))

    @contextmanager
    def kernel(self, name: str, launches: int) -> Iterator[None]:
        self.count[name] += launches
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


def counted(launches: Launches, kernel: Kernel) -> Kernel:
    """``kernel`` as one that launches what the portable one does."""

    def watched(run: Callable[..., Any], part: str, times: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with launches.kernel(f"{kernel.op} {part}", times):
                return run(*args)

        return call

    forward, backward = LAUNCHES[kernel.op]
    assert kernel.backward is not None
    return Kernel(
        kernel.op, "counted", VENDOR, watched(kernel.forward, "forward", forward),
        watched(kernel.backward, "backward", backward), version=kernel.version, overwrites=kernel.overwrites,
        private=kernel.private,
    )  # fmt: skip


def registry(launches: Launches) -> Registry:
    found = torch_registry()
    for op in LAUNCHES:
        found.register(counted(launches, found.kernel(op, "aten")))
    return found


def launched(layers: int, **config: Any) -> Counter[str]:
    """All launches of one step's forward and backward, by what is launched."""
    spec = from_hf_config({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, **config,
    })  # fmt: skip
    plan = plan_from_dict(
        {"seq_length": LENGTH, "global_batch_size": 1, "pipelines": [
            {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [{"ranks": [0], "layers": [0, layers]}]}
        ]}, spec,
    )  # fmt: skip
    launches = Launches()
    signatures = stage_signatures(Signature("", "cpu", torch.float32), spec, shares(spec, (1,))[0], True, 1)
    compiled, comm = CompiledPlan(plan, spec), FakeComm(0, torch.device("cpu"))
    comm.create_groups(compiled.groups)
    runtime = Runtime(
        compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 0),
        optimizer_factory(OptimizerConfig()), kernels=resolve(registry(launches), signatures),
    )  # fmt: skip
    work = runtime.work(lambda indices: _batch(len(indices), LENGTH), 0, 1)
    with launches:
        runtime.executor.run(work)
    return launches.count


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({}, 29),
        ({"model_type": "qwen2"}, 33),  # biases of q, k and v: three sums of columns as one, three gradients
        ({"model_type": "qwen3", "head_dim": 8}, 37),  # norms of q and k: a forward and two backwards each
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_launches_of_a_layer_only_become_fewer(config: dict[str, Any], most: int) -> None:
    """``most`` is lowered by whoever saves one; nobody raises it. A layer in the middle of a stage: what three layers
    launch beyond what two do."""
    more = launched(3, **config) - launched(2, **config)
    assert more.total() <= most, dict(more)
    assert more["attention forward"] == 1 and sum(n for name, n in more.items() if "mm" in name) == 12
