"""The registry and the kernel plan: order, refusals, freezing, deferral, torch.compile; and equal training."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_megatron.errors import UserError
from hetero_megatron.ops import SPECS, Capability, Kernel, KernelWarning, Registry, Signature, resolve, torch_registry
from hetero_megatron.ops.gemm import weight_gradient
from hetero_megatron.ops.library import define, operator_name
from hetero_megatron.ops.norm import rms_norm_backward, rms_norm_forward
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.ops.spec import ATEN, REFERENCE, TRITON, VENDOR
from hetero_megatron.plans.kernels import OPERATORS

SIGNATURE = Signature("rms_norm", "cpu", torch.float32, dims={"width": (64,)})


def kernel(provider: str, kind: str = VENDOR, **more: Any) -> Kernel:
    return Kernel("rms_norm", provider, kind, rms_norm_forward, rms_norm_backward, **more)


def with_kernels(*kernels: Kernel) -> Registry:
    registry = torch_registry()
    for k in kernels:
        registry.register(k)
    return registry


def chosen(registry: Registry, requests: dict[str, str] | None = None, signature: Signature = SIGNATURE) -> str:
    return resolve(registry, [signature], requests).provider("rms_norm")


def test_operator_names_are_those_that_plans_accept() -> None:
    assert tuple(sorted(SPECS)) == OPERATORS


def test_order_is_user_vendor_triton_aten_reference() -> None:
    kernels = [kernel("acme"), kernel("tri", TRITON)]
    registry = with_kernels(*kernels)
    assert chosen(registry) == "acme"
    assert chosen(with_kernels(kernels[1])) == "tri"
    assert chosen(torch_registry()) == "aten"
    for wanted in ("acme", "tri", "aten", "reference"):
        assert chosen(registry, {"rms_norm": wanted}) == wanted
        assert chosen(registry, {"all": wanted}) == wanted
    assert chosen(registry, {"all": "tri", "rms_norm": "aten"}) == "aten"


def test_equal_rank_is_an_error_unless_priorities_or_the_user_decide() -> None:
    two = with_kernels(kernel("one"), kernel("two"))
    with pytest.raises(UserError, match="one and two serve .* with equal rank"):
        chosen(two)
    assert chosen(two, {"rms_norm": "two"}) == "two"
    assert chosen(with_kernels(kernel("one"), kernel("two", priority=1))) == "two"
    only_fp16 = Capability(dtypes=(torch.float16,))
    assert chosen(with_kernels(kernel("one"), kernel("two", capability=only_fp16))) == "one"


LIMITS = {
    "device": (Capability(devices=("cuda",)), SIGNATURE, "device cpu, not cuda"),
    "platform": (Capability(platforms=("acme",)), SIGNATURE, "platform unknown, not acme"),
    "dtype": (Capability(dtypes=(torch.bfloat16,)), SIGNATURE, "dtype float32, not bfloat16"),
    "old": (Capability(arch_min=(9, 0)), replace(SIGNATURE, arch=(8, 6)), "chip 8.6 is older than 9.0"),
    "new": (Capability(arch_max=(9, 0)), replace(SIGNATURE, arch=(10, 0)), "chip 10.0 is newer than 9.0"),
    "torch": (Capability(torch_min=(99, 0)), SIGNATURE, "is older than 99.0"),
    "size": (Capability(largest={"width": 32}), SIGNATURE, "width 64 is over 32"),
    "bits": (Capability(deterministic=False), replace(SIGNATURE, deterministic=True), "it is not deterministic"),
    "compile": (Capability(compile_ok=False), replace(SIGNATURE, compiled=True), "it cannot be compiled"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_capability_is_data_and_each_limit_has_its_reason(name: str) -> None:
    """A kernel that cannot serve is passed over, and refused with the reason when it was asked for."""
    capability, signature, reason = LIMITS[name]
    registry = with_kernels(kernel("acme", capability=capability))
    plan = resolve(registry, [signature])
    assert plan.provider("rms_norm") == "aten" and reason in plan.format()
    with pytest.raises(UserError) as caught:
        chosen(registry, {"rms_norm": "acme"}, signature)
    assert caught.value.field == "kernels.rms_norm" and caught.value.value == "acme"
    other = "--platform acme beside it, or " if name == "platform" else ""
    assert reason in str(caught.value) and f"Accepted: {other}aten, reference" in str(caught.value)


def test_predicate_and_request_only_kernels() -> None:
    registry = with_kernels(
        kernel("even", supports=lambda s: ["the width is odd"] if s.dims["width"][0] % 2 else []),
        kernel("slow", priority=1, capability=Capability(automatic=())),
    )
    assert chosen(registry) == "even"
    assert chosen(registry, signature=replace(SIGNATURE, dims={"width": (63,)})) == "aten"
    assert chosen(registry, {"all": "slow"}) == "slow"


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ({"rms_nrom": "aten"}, "no such operator (did you mean rms_norm?)"),
        ({"rms_norm": "attn"}, "no such provider of rms_norm (did you mean aten?)"),
        ({"all": "tritn"}, "no such provider"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(requests: dict[str, str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        chosen(torch_registry(), requests)
    assert says in str(caught.value) and "Accepted: " in str(caught.value)


def test_bad_registrations_are_refused() -> None:
    registry = torch_registry()
    for bad, says in (
        (replace(kernel("acme"), op="rms"), "no such operator"),
        (replace(kernel("acme"), backward=None), "it has no backward"),
        (replace(kernel("acme"), version=2), "another version of the operator"),
        (replace(kernel("acme"), kind="fast"), "is no kind of provider"),
        (replace(kernel("acme"), provider="aten"), "registered twice"),
        (replace(registry.kernel("gemm", "aten"), provider="acme", parts={}), "it lacks the part input"),
    ):
        with pytest.raises(UserError, match=says):
            registry.register(bad)


def test_unintended_use_of_the_reference_warns_and_intended_does_not() -> None:
    bare = Registry({"rms_norm": SPECS["rms_norm"]}, [reference_kernel(SPECS["rms_norm"])])
    with pytest.warns(KernelWarning, match="runs on the slow reference"):
        chosen(bare)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(bare, {"rms_norm": "reference"}) == "reference"
        assert chosen(torch_registry(), {"all": "reference"}) == "reference"


def test_an_exception_in_a_kernel_is_no_reason_to_fall_back() -> None:
    calls = []

    def broken(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        raise RuntimeError("out of memory")

    plan = resolve(with_kernels(replace(kernel("acme"), forward=broken)), [SIGNATURE])
    with pytest.raises(RuntimeError, match="out of memory"):
        plan.rms_norm(torch.ones(2, 64), torch.ones(64), 1e-5)
    assert len(calls) == 1


def test_a_predicate_that_raises_is_named_with_its_plugin() -> None:
    def supports(signature: Signature) -> list[str]:
        raise KeyError("arch")

    registry = with_kernels(kernel("acme", supports=supports))
    with pytest.raises(UserError, match=r"supports\(\) of rms_norm:acme raised KeyError: 'arch'"):
        resolve(registry, [SIGNATURE])
    assert resolve(registry, [SIGNATURE], {"rms_norm": "aten"}).provider("rms_norm") == "aten"


def test_a_plan_is_printed_and_hashed() -> None:
    a, b = (resolve(torch_registry(), [SIGNATURE], r) for r in ({}, {"rms_norm": "reference"}))
    assert a.digest() == resolve(torch_registry(), [SIGNATURE]).digest() != b.digest() and len(a.digest()) == 16
    assert "rms_norm" in a.format() and "requested" in b.format() and a.summary() == "aten: rms_norm"
    with pytest.raises(UserError, match="no such operator in this kernel plan"):
        _ = a.layer_norm


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="its addmm.dtype_out has no meta tensors")
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_fp32_sum_takes_products_that_were_never_rounded_where_aten_can(beta: float) -> None:
    ran: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(function))
            return function(*args, **(kwargs or {}))

    dy, x = (torch.empty(2, 3, n, dtype=torch.bfloat16, device="meta") for n in (5, 4))  # has what a GPU has
    into = torch.empty(5, 4, device="meta")
    with Record():
        assert weight_gradient(dy, x, into, beta) is into
    assert [name for name in ran if "mm" in name] == ["aten.addmm.dtype_out"]
    assert not any("add_" in name or "copy" in name for name in ran)


def test_deferred_weight_gradients_equal_immediate_ones_and_run_the_hooks() -> None:
    plan = resolve(torch_registry(), [Signature("gemm", "cpu", torch.float64)])
    weight = torch.nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    seen: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def run() -> None:
        plan.gemm(plan.gemm(x, weight, None) @ weight, weight, None).square().sum().backward()

    run()
    want, want_x, count = weight.grad.clone(), x.grad.clone(), len(seen)  # type: ignore[union-attr]
    weight.grad = x.grad = None
    plan.weight_gradients.deferring = True
    (plan.gemm(x, weight, None)).square().sum().backward()
    assert weight.grad is None and len(plan.weight_gradients) == 1
    plan.weight_gradients.flush()
    first = weight.grad.clone()  # type: ignore[union-attr]
    torch.testing.assert_close(first, 2 * (x @ weight.t()).flatten(0, 1).t().detach() @ x.detach().flatten(0, 1))
    weight.grad = x.grad = None
    run()
    plan.weight_gradients.flush()
    torch.testing.assert_close(weight.grad, want)
    torch.testing.assert_close(x.grad, want_x)
    assert count == 1 and len(seen) > count
    buffer = torch.ones(5, 4, dtype=torch.float64)
    plan.weight_gradients.assign([weight], lambda dy, x, kernel: kernel(dy, x, buffer))
    weight.grad = None
    plan.gemm(x, weight, None).square().sum().backward()
    plan.weight_gradients.flush()
    torch.testing.assert_close(buffer, first + 1)
    plan.weight_gradients.deferring = False
    plan.gemm(x, weight, None).square().sum().backward()
    torch.testing.assert_close(buffer, 2 * first + 1)
    assert weight.grad is None


@pytest.mark.parametrize("provider", ["aten", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(3, 4), (2, 0)])
def test_weight_gradients_are_added_in_place(provider: str, dtype: torch.dtype, rows: tuple[int, int]) -> None:
    """Over several micro-batches, the first of which finds nothing there, against one product in fp64."""
    product = torch_registry().kernel("gemm", provider).parts["weight"]
    generator = torch.Generator().manual_seed(0)
    into = torch.full((5, 6), float("nan"), dtype=torch.promote_types(dtype, torch.float32))
    want = torch.zeros(5, 6, dtype=torch.float64)
    for i in range(3):
        dy = torch.randn(*rows, 5, generator=generator, dtype=torch.float64).to(dtype)
        x = torch.randn(*rows, 6, generator=generator, dtype=torch.float64).to(dtype)
        assert product(dy, x, into, float(i > 0)) is into
        want += dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    torch.testing.assert_close(into.double(), want, rtol=0, atol=1e-13 if dtype == torch.float64 else 1e-5)


def swapped(x: torch.Tensor) -> torch.Tensor:
    """The same values, the first two axes the other way round in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("provider", ["aten", "reference"])
@pytest.mark.parametrize("op", sorted(n for n, s in SPECS.items() if s.schema is not None))
def test_torch_operators_pass_opcheck(op: str, provider: str, transposed: bool) -> None:
    """Schema, fake tensors and autograd registration, by torch's own checker; strides of results are as promised."""
    spec, k = SPECS[op], torch_registry().kernel(op, provider)
    if k.private:
        pytest.skip("private state: a graph break")
    operator = define(spec, k)
    target = getattr(torch.ops.hetero_megatron, operator_name(spec, k)).default
    case = next(iter(spec.cases()))
    args = [
        (swapped(a) if transposed else a).float().requires_grad_(n in spec.gradients)
        if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for n, a in zip(spec.args, case.args, strict=True)
    ]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(target, tuple(args), test_utils=tests)
    live = [a for a, n in zip(args, spec.args) if n in spec.gradients and a is not None]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        made = operator(*fakes)
        grads = torch.autograd.grad(made[0], [f for f, a in zip(fakes, args) if any(a is x for x in live)],
                                    torch.ones_like(made[0]))  # fmt: skip
    real = operator(*args)
    found = torch.autograd.grad(real[0], live, torch.ones_like(real[0]))
    for promised, got in zip((*made, *grads), (*real, *found), strict=True):
        assert (promised.stride(), promised.shape) == (got.stride(), got.shape)


@pytest.mark.slow
def test_compiled_operators_give_equal_gradients_in_one_graph() -> None:
    signature = replace(SIGNATURE, compiled=True)
    opaque = replace(kernel("acme"), traceable=False)
    x, w = torch.randn(3, 64), torch.rand(64)

    def run(plan: Any, compiled: bool) -> list[torch.Tensor]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()

        def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return plan.rms_norm(a * 2, b, 1e-5).sin().sum()

        call = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
        out = call(a, b)
        return [out.detach(), *torch.autograd.grad(out, [a, b])]

    want = run(resolve(torch_registry(), [SIGNATURE]), False)
    for registry in (torch_registry(), with_kernels(opaque)):
        plan = resolve(registry, [signature])
        for got, expected in zip(run(plan, True), want, strict=True):
            torch.testing.assert_close(got, expected)


def test_kinds_are_ordered() -> None:
    kinds = [k.kind for k in with_kernels(kernel("a"), kernel("b", TRITON)).kernels("rms_norm")]
    assert kinds == [VENDOR, TRITON, ATEN, REFERENCE]
