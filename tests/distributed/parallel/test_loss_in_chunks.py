"""Head and loss in chunks call the kernel plan's operators, and labels outside the vocabulary never pass unseen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.data.batch import Batch
from hetero_megatron.errors import UserError
from hetero_megatron.model import initial_values
from hetero_megatron.ops import SPECS, Kernel, KernelPlan, Signature, resolve, torch_registry
from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.gemm import KERNELS as GEMM
from hetero_megatron.ops.gemm import WeightGradients, weight_gradient
from hetero_megatron.ops.spec import VENDOR
from hetero_megatron.ops.stage import stage_signatures
from hetero_megatron.ops.vocab_cross_entropy import gradient, statistics
from hetero_megatron.parallel.vocab import in_chunks, loss_chunk, vocab_loss
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec import Lora, ModelSpec, adapted, shares
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.alignment.session import unwatched_operators
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.kernels import agree_on_kernels
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.train import optimizer_factory
from tests.distributed.parallel.test_context_kernels import CONTEXT
from tests.distributed.training.test_kernel_training import LENGTH, MODEL, batch, make_plan
from tests.support.pool import shared_pool
from tests.support.programs import run_ranks

ALONE = FakeComm(0, torch.device("cpu")).group([0])
OUTSIDE = [-100, -1, 23]
PROVIDERS = ["aten", "reference", "triton"]


def kernel_of(op: str, provider: str) -> Kernel:
    return load_plugins().registry.kernel(op, provider)


def head(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    x, weight = torch.randn(2, 9, 8).to(dtype).requires_grad_(), torch.randn(23, 8).to(dtype).requires_grad_()
    return x, weight, torch.randint(0, 23, (2, 9))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_provider_serves_both_directions(provider: str) -> None:
    x, weight, labels = head()
    want = torch.nn.functional.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")
    seeds = torch.rand(2, 9).double()
    exact = torch.autograd.grad(want, (x, weight), seeds.flatten())
    op = bind(SPECS["vocab_cross_entropy"], kernel_of("vocab_cross_entropy", provider))
    product = kernel_of("gemm", "aten" if provider == "triton" else provider)
    loss = in_chunks(vocab_loss(WeightGradients(), ALONE, (0, 23), op, product), 4, x, weight, labels, seeds)
    found = torch.autograd.grad(loss, (x, weight), seeds)
    for got, right in zip((loss.flatten(), *found), (want, *exact), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_weight_gradients_of_chunks_are_not_rounded_before_they_are_added() -> None:
    """Two words, equal logits: dy is exactly a half. The first chunk's product, 128.5, has more digits than bf16."""
    x = torch.tensor([[256.0], [1.0], [-256.0], [1.0]], dtype=torch.bfloat16)
    weight, gradients = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True), WeightGradients()
    total = torch.zeros(2, 1)
    gradients.assign([weight], lambda dy, x, kernel: kernel(dy, x, total, 1.0))
    labels, seeds = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    in_chunks(vocab_loss(gradients, ALONE, (0, 2)), 2, x, weight, labels, seeds).sum().backward()
    assert weight.grad is None and total.flatten().tolist() == [-1.0, 1.0]


def counting_plan(called: list[str], spec: ModelSpec, requests: dict[str, str]) -> KernelPlan:
    """A plan whose vendor counts the calls of what the head and its loss need."""

    def forward(*args: Any) -> Any:
        called.append("forward")
        return statistics(*args)[:3]

    def backward(*args: Any) -> Any:
        called.append("backward")
        return gradient(*args)

    def weight(dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0) -> torch.Tensor:
        called.append("weight" if dy.shape[-1] == spec.vocab_size else "other weight")
        return weight_gradient(dy, x, into, beta)

    registry = torch_registry()
    registry.register(Kernel("vocab_cross_entropy", "acme", VENDOR, forward, backward, overwrites=("logits",)))
    aten = GEMM[0]
    registry.register(replace(aten, provider="acme", kind=VENDOR, parts={**aten.parts, "weight": weight}))
    base = Signature("", "cpu", torch.float32)
    return resolve(registry, stage_signatures(base, spec, shares(spec, (1,))[0], True, 1, requests, True), requests)


def test_a_chunked_head_runs_what_its_kernel_plan_says() -> None:
    spec = from_hf_config(MODEL)
    plan, called = make_plan(spec, {"ranks": 0, "layers": [0, 2]}), list[str]()
    kernels = counting_plan(called, spec, {"vocab_cross_entropy": "acme"})
    assert kernels.provider("vocab_cross_entropy") == "acme" and "cross_entropy" not in kernels.choices
    comm, losses = FakeComm(0, torch.device("cpu")), []
    for given, limit in ((kernels, 4 * 101 * 16), (None, 1 << 30)):
        runtime = Runtime(
            CompiledPlan(plan, spec), comm, torch.float32, lambda t, box: initial_values(t, box, spec, 7), None,
            kernels=given, options=RuntimeOptions(logits_bytes=limit),
        )  # fmt: skip
        assert (runtime.loss.chunk is None) == (given is None)
        data = batch()
        out = runtime.stage_model.module(data.tokens, data)
        loss = runtime.loss(out, data, 1.0)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    chunks = -(-2 * 64 // 4)
    counts = {kind: called.count(kind) for kind in ("forward", "backward", "weight")}
    assert counts == {"forward": chunks, "backward": chunks, "weight": chunks}


@pytest.mark.parametrize("frozen", [False, True])
def test_training_makes_loss_and_gradients_at_once(frozen: bool) -> None:
    """Unasked, in whole tiles of tokens, straight into the sum in fp32; a frozen head goes through the products that
    make no gradient of it. Against logits that are there as a whole."""
    spec = from_hf_config(MODEL | {"max_position_embeddings": 256})
    if frozen:
        spec = adapted(spec, Lora(2, 4.0, ("q_proj",)))
    data = {"seq_length": 170, "global_batch_size": 4, "pipelines": [
        {"micro_batch_size": 4, "num_micro_batches": 1, "stages": [{"ranks": [0], "layers": [0, 2]}]}]}  # fmt: skip
    plan, calls, aten = plan_from_dict(data, spec), list[tuple[int, bool]](), kernel_of("linear_cross_entropy", "aten")

    def never(*args: Any) -> Any:
        raise AssertionError("the gradient of the losses is known")

    def together(*args: Any) -> Any:
        x, weight, _, _, into, beta = args
        assert into is not None and into.dtype == torch.float32 and into.shape == weight.shape
        calls.append((len(x), bool(beta)))
        return aten.parts["fwd_bwd"](*args)  # type: ignore[operator]

    registry = torch_registry()
    parts = {"fwd_bwd": together}
    registry.register(replace(aten, provider="acme", kind=VENDOR, forward=never, backward=never, parts=parts))
    base, limit = Signature("", "cpu", torch.float32), 4 * 4 * 101 * 130
    chunked = stage_signatures(base, spec, shares(spec, (1,))[0], True, 1, (), True)
    tokens = torch.randint(0, 101, (4, 171), generator=torch.Generator().manual_seed(1))
    counts = torch.rand(4, 170, generator=torch.Generator().manual_seed(2)) < 0.7
    data_batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(170).expand(4, 170), loss_mask=counts)
    found = []
    for kernels, most in ((resolve(registry, chunked), limit), (None, 1 << 30)):
        runtime = Runtime(
            CompiledPlan(plan, spec), FakeComm(0, torch.device("cpu")), torch.float32,
            lambda t, box: initial_values(t, box, spec, 7), optimizer_factory(OptimizerConfig()), kernels=kernels,
            options=RuntimeOptions(logits_bytes=most),
        )  # fmt: skip
        stats = runtime.train_step(lambda _: data_batch, 0, 4, 1e-3, loss_scale=1024.0)
        found.append(torch.tensor([stats.loss, stats.grad_norm]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    assert calls == ([] if frozen else [(128, False), *[(128, True)] * 4, (40, True)])


def test_a_request_that_chunks_would_ignore_is_refused() -> None:
    spec, share = from_hf_config(MODEL), shares(from_hf_config(MODEL), (1,))[0]
    base = Signature("", "cpu", torch.float32)
    with pytest.raises(UserError, match="goes through them in chunks"):
        stage_signatures(base, spec, share, True, 1, {"cross_entropy": "aten"}, True)
    for wanted, runs in (("vocab_cross_entropy", "vocab_cross_entropy"), ("linear_cross_entropy",) * 2):
        ops = {s.op for s in stage_signatures(base, spec, share, True, 1, {wanted: "aten"}, True)}
        assert {op for op in ops if "cross_entropy" in op} == {runs}


def test_all_ranks_of_a_stage_go_through_chunks_if_one_must() -> None:
    spec = from_hf_config(MODEL)
    data = {"seq_length": 64, "global_batch_size": 4, "pipelines": [
        {"micro_batch_size": 4, "num_micro_batches": 1,
         "stages": [{"ranks": [0, 1], "layers": [0, 2], "tp": 1, "dp_split": [3, 1]}]}]}  # fmt: skip
    stage = plan_from_dict(data, spec).pipelines[0].stages[0]
    rows = [u.sequences[1] - u.sequences[0] for u in stage.units]
    per_sequence = 64 * 101 * 4
    limits = {min(rows) * per_sequence: False, max(rows) * per_sequence: True}
    for limit, whole in limits.items():
        found = [loss_chunk(stage, i, spec, torch.float32, limit) for i in range(len(rows))]
        assert all((chunk is None) == whole for chunk in found)


@pytest.mark.slow
def test_the_run_prints_what_runs_and_names_what_it_cannot_watch() -> None:
    flags = [
        "--model", "tiny", "--mock-data", "--seq-length", "1100", "--lr", "1e-3",
        "--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1", "--max-logits-mib", "1",
    ]  # fmt: skip
    apart = [*flags, "--kernels", "vocab_cross_entropy=aten"]
    good, _ = run_ranks(1, [*apart, "--check-operators", "gemm", "swiglu", "adamw", "vocab_cross_entropy"])
    line = next(x for x in good.splitlines() if x.startswith("kernels of pipeline 0 stage 0"))
    assert ", vocab_cross_entropy" in line and " cross_entropy" not in line
    for op in ("gemm", "adamw", "vocab_cross_entropy"):
        assert f"notice: operators of rank 0: {op} is not watched: " in good
    assert "swiglu is not watched" not in good
    _, bad = run_ranks(1, [*flags, "--kernels", "cross_entropy=aten"], code=2)
    assert "--max-logits-mib" in bad and "kernels.cross_entropy" in bad


def agreed(comm: Comm, stage: dict[str, Any]) -> set[str]:
    """Operators that cannot be watched, of ranks that agree on their kernels."""
    spec = from_hf_config(MODEL)
    data = {"seq_length": LENGTH, "global_batch_size": 2,
            "pipelines": [{"micro_batch_size": 2, "num_micro_batches": 1, "stages": [stage]}]}  # fmt: skip
    plan = plan_from_dict(data, spec)
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return set()
    runtime = Runtime(compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 7), None)
    agree_on_kernels(runtime)
    return set(unwatched_operators(runtime))


def test_attention_between_context_groups_is_named_too() -> None:
    assert shared_pool().run(agreed, CONTEXT)[:3] == [{"adamw", "attention", "attn_merge"}] * 3


def test_tp_groups_of_one_rank_and_of_two_agree_though_their_losses_are_different_operators() -> None:
    stage = {"ranks": [[0, 1], [2]], "layers": [0, 2], "dp_split": [1, 1]}
    cut = {"adamw", "vocab_cross_entropy"}
    assert shared_pool().run(agreed, stage)[:3] == [cut, cut, {"adamw"}]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("label", OUTSIDE)
@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy", "vocab_cross_entropy"])
def test_a_label_outside_the_vocabulary_raises_or_gives_nan(op: str, label: int, provider: str) -> None:
    x, weight, labels = head(torch.float32)
    labels[1, 4] = label
    kernel = kernel_of(op, provider)
    with torch.no_grad():
        try:
            if op == "vocab_cross_entropy":
                loss = in_chunks(
                    vocab_loss(WeightGradients(), ALONE, (0, 23), bind(SPECS[op], kernel)), 4, x, weight, labels, None
                )
            elif op == "cross_entropy":
                loss = kernel.forward(x @ weight.t(), labels)[0]
            else:
                loss = kernel.forward(x, weight, labels)[0]
        except (IndexError, RuntimeError) as error:
            assert "out of bounds" in str(error)
            return
    wrong = torch.zeros(2, 9, dtype=torch.bool)
    wrong[1, 4] = True
    assert torch.equal(loss.isnan(), wrong)
