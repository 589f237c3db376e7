"""Watching the operators of a real training step: capture to files, and live comparison against fp64.

Both wrap the callables of a kernel plan, so they see what every provider got and gave, without touching the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops import KernelPlan, OpSpec
from hetero_megatron.ops.conformance.compare import distance, oracle
from hetero_megatron.utils.text import plural

Observer = Callable[["Call"], None]


@dataclass
class Call:
    """One call of one operator in a step: arguments, results, and the gradients that backward brought.

    ``layer`` is the module it was called in (``layers.3.mlp``), empty outside of layers.
    """

    op: str
    provider: str
    layer: str
    index: int  # n-th call of this operator in this layer since watching began
    args: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]
    grads: dict[str, torch.Tensor] = field(default_factory=dict)  # of arguments, and "d" + name of results


class CallRecorder:
    """Watches chosen operators and layers.

    Args:
        ops: names of operators; empty: all that have gradients.
        layers: parts of layer names (``layers.0.``); empty: everywhere.
        done: called with each call, as soon as its gradients are there (at once where none will come).
    """

    def __init__(self, done: Observer, ops: Collection[str] = (), layers: Collection[str] = ()) -> None:
        self.done, self.ops, self.layers = done, set(ops), tuple(layers)
        self.active, self._place = True, ""
        self._count: dict[tuple[str, str], int] = {}

    def wrap(self, plan: KernelPlan) -> KernelPlan:
        """A plan whose chosen operators are watched."""
        for op in self.ops:
            plan.registry.spec(op)
        chosen = [op for op in plan.choices if self.wants(plan.registry.spec(op))]
        specs = {op: plan.registry.spec(op) for op in chosen}
        watched_ops = [op for op, spec in specs.items() if not spec.split and not spec.in_place]
        return plan.with_calls({op: self._watched(plan, op) for op in watched_ops})

    def wants(self, spec: OpSpec) -> bool:
        """Whether an operator was chosen."""
        return spec.name in self.ops if self.ops else bool(spec.gradients)

    def follow(self, model: torch.nn.Module) -> None:
        """Know in which module an operator is called."""
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(self._enter(name.removeprefix("model.")))

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: torch.nn.Module, args: Any) -> None:
            self._place = name

        return enter

    def _watched(self, plan: KernelPlan, op: str) -> Callable[..., Any]:
        call, spec, provider = getattr(plan, op), plan.registry.spec(op), plan.provider(op)

        def watched(*args: Any) -> Any:
            layer = self._place
            if not self.active or (self.layers and not any(part in f"{layer}." for part in self.layers)):
                return call(*args)
            args = args[: len(spec.args)]  # what comes after (of head and loss) only saves a product
            key = (op, layer)
            index = self._count[key] = self._count.get(key, -1) + 1
            # Copies: some are overwritten.
            inputs = tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)
            record = Call(op, provider, layer, index, inputs, ())
            out = call(*self._gradients_of(spec, record, args))
            results = out if isinstance(out, tuple) else (out,)
            record.results = tuple(r.detach().clone() for r in results)
            for name, r in zip(spec.results, results, strict=True):
                if r.requires_grad:
                    r.register_hook(partial(_keep, record, f"d{name}"))
            if not any(r.requires_grad for r in results):
                self.done(record)
            return out

        return watched

    def _gradients_of(self, spec: OpSpec, record: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, each as a view of its own whose gradient is this call's alone; the last to come ends it."""
        waiting: set[str] = set()
        out: list[Any] = []

        def came(name: str, grad: torch.Tensor) -> None:
            _keep(record, name, grad)
            waiting.discard(name)
            if not waiting:
                self.done(record)

        for name, arg in zip(spec.args, args, strict=True):
            needs_grad = isinstance(arg, torch.Tensor) and arg.requires_grad and torch.is_grad_enabled()
            if needs_grad and name in spec.gradients:
                arg = arg.view_as(arg)
                arg.register_hook(partial(came, name))
                waiting.add(name)
            out.append(arg)
        return tuple(out)


def _keep(record: Call, name: str, grad: torch.Tensor) -> None:
    record.grads[name] = grad.detach().clone()


@dataclass(frozen=True)
class Deviation:
    """Relative error of one call against fp64: of results and of gradients (the worst)."""

    op: str
    provider: str
    layer: str
    index: int
    forward: float
    backward: float


class LiveCompare:
    """Runs the definition in fp64 beside every watched call and keeps the errors, in the order of completion."""

    def __init__(self, specs: Mapping[str, OpSpec]) -> None:
        self.specs = specs
        self.deviations: list[Deviation] = []

    def __call__(self, call: Call) -> None:
        spec = self.specs[call.op]
        incoming = [call.grads.get(f"d{name}") for name in spec.results if name not in spec.fixed]
        full = bool(call.grads) and all(g is not None for g in incoming)
        with torch.enable_grad():
            exact_results, gradients = oracle(spec, call.args, incoming if full else None)  # type: ignore[arg-type]
        forward = max((distance(g, w)[0] for g, w in zip(call.results, exact_results)), default=0.0)
        names = [n for n in spec.gradients if call.args[spec.args.index(n)] is not None]
        backward = max(
            (distance(call.grads[n], w)[0] for n, w in zip(names, gradients) if n in call.grads), default=0.0
        )
        self.deviations.append(Deviation(call.op, call.provider, call.layer, call.index, forward, backward))

    def worst(self, count: int = 10) -> list[Deviation]:
        return sorted(self.deviations, key=lambda d: -max(d.forward, d.backward))[:count]

    def over_bounds(self, dtype: torch.dtype) -> list[Deviation]:
        """Calls whose errors are over the conformance bounds of their operator."""
        out = []
        for d in self.deviations:
            forward, backward = self.specs[d.op].bounds.of(dtype)
            if d.forward > forward or d.backward > backward:
                out.append(d)
        return out

    def text(self, dtype: torch.dtype) -> str:
        """A table of the worst calls."""
        over = self.over_bounds(dtype)
        lines = [f"{'operator':<24}{'provider':<12}{'layer':<40}{'forward':>10}{'backward':>10}"]
        for d in self.worst():
            mark = "  over its bound" if d in over else ""
            lines.append(f"{d.op:<24}{d.provider:<12}{d.layer:<40}{d.forward:>10.1e}{d.backward:>10.1e}{mark}")
        return "\n".join([*lines, f"{plural(len(self.deviations), 'call')}, {len(over)} over the bounds of {dtype}"])


class CaptureFiles:
    """Writes every watched call to ``directory/<layer>.<op>.<n>.pt`` (a dict that ``load_call`` reads)."""

    def __init__(self, directory: str | Path, limit: int = 1000) -> None:
        self.directory, self.limit, self.written = Path(directory), limit, 0
        self.directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, call: Call) -> None:
        if self.written >= self.limit:
            return
        self.written += 1
        name = ".".join(filter(None, (call.layer, call.op, str(call.index))))
        torch.save(vars(call), self.directory / f"{name}.pt")


def load_call(path: str | Path) -> Call:
    """A captured call.

    Raises:
        UserError: the file is not one.
    """
    try:
        return Call(**torch.load(path, weights_only=True))
    except Exception as error:
        raise UserError(f"not a captured operator ({error})", field="file", value=str(path)) from error
