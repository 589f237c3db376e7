"""The sharded optimizer: each element is updated by its one owner; AdamW and SGD of owned pieces, in host memory where
a stage offloads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
from hetero_megatron.parallel.grad_sync.gathering import ParameterGather
from hetero_megatron.parallel.grad_sync.gradients import GradientSync
from hetero_megatron.parallel.grad_sync.routes import OwnedPiece, by_key
from hetero_megatron.spec.tensors import MAGNITUDE

if TYPE_CHECKING:
    from hetero_megatron.parallel.host_memory import HostRows


class Optimizer(Protocol):
    """What is needed of an optimizer; torch's have it.

    Attributes:
        param_groups: dicts with ``params``, ``lr``, ``weight_decay``; state: by parameter, made at its first step.
    """

    param_groups: list[dict[str, Any]]
    state: Any  # a mapping, invariant in what it holds

    def step(self) -> object: ...


FirstValues = Callable[[Sequence[str], Sequence[OwnedPiece]], list[torch.Tensor]]  # of pieces of tensors
OptimizerFactory = Callable[[list[dict[str, object]]], Optimizer]  # groups: dicts with ``params`` and ``decay``


class ScalingOptimizer:
    """An optimizer whose step also scales the gradients, and writes new values to ``copies`` of a group's parameters
    where it has some: in one pass, where its kernel can."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0, "weight_decay": 0.0, **group} for group in groups]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, grad_scale: float = 1.0) -> None:
        """Update every parameter that has a gradient, which counts times ``grad_scale`` (and may be overwritten)."""
        for group in self.param_groups:
            self.step_group(group, grad_scale)

    def step_group(self, group: dict[str, Any], grad_scale: float) -> None:
        indices = [i for i, p in enumerate(group["params"]) if p.grad is not None]
        params, copies = ([group[key][i] for i in indices] if key in group else [] for key in ("params", "copies"))
        if params:
            states = [self.state[p] if p in self.state else self.state.setdefault(p, {}) for p in params]
            rates = group["lr"], group["weight_decay"], grad_scale
            self._update(params, [p.grad for p in params], states, copies, *rates)

    def _update(
        self, params: list[torch.Tensor], grads: list[Any], states: list[dict[str, Any]], copies: list[torch.Tensor],
        lr: float, decay: float, scale: float,
    ) -> None:  # fmt: skip
        raise NotImplementedError


class AdamW(ScalingOptimizer):
    """Loshchilov and Hutter, 2019.

    Args:
        kernel: the operator ``adamw``.
    """

    def __init__(
        self, groups: list[dict[str, object]], kernel: Callable[..., Any], betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups)
        self.kernel, self.betas, self.eps = kernel, betas, eps

    def _update(
        self, params: list[torch.Tensor], grads: list[Any], states: list[dict[str, Any]], copies: list[torch.Tensor],
        lr: float, decay: float, scale: float,
    ) -> None:  # fmt: skip
        for p, state in zip(params, states, strict=True):
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
        first, second = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        self.kernel(params, grads, first, second, copies, states[0]["step"], lr, *self.betas, self.eps, decay, scale)


class SGD(ScalingOptimizer):
    """With weight decay added to the gradient and momentum of the sum, as torch has it."""

    def __init__(self, groups: list[dict[str, object]], momentum: float) -> None:
        super().__init__(groups)
        self.momentum = momentum

    def _update(
        self, params: list[torch.Tensor], grads: list[Any], states: list[dict[str, Any]], copies: list[torch.Tensor],
        lr: float, decay: float, scale: float,
    ) -> None:  # fmt: skip
        if scale != 1.0:
            torch._foreach_mul_(grads, scale)
        if decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        if self.momentum:
            for p, state in zip(params, states, strict=True):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, grads)
            grads = buffers
        torch._foreach_add_(params, grads, alpha=-lr)
        if copies:
            torch._foreach_copy_(copies, params)


class ShardedOptimizer:
    """An optimizer over the owned pieces of the parameters.

    A piece's master weights are the parameter's own memory where that is contiguous and full precision, else a
    copy (fp32 for 16-bit parameters), as it always is of weights that the stage divides. Biases and one-dimensional
    tensors (weights of norms) are not decayed, as in Megatron.

    Args:
        sync: whose exchanges define the pieces.
        build: makes the optimizer from parameter groups (keys ``params``, ``decay``, and of those of Muon's matrices
            ``matrices``: the dtype of the weights).
        offload: masters (then always copies) and moments live in host memory.
        apart: names of parameters that ``build``'s optimizer does not get: their masters change otherwise.
        divided: first values of pieces of weights that the stage divides, and of matrices that the rank owns whole and
            holds in part, which the parameters do not have.
        host: of a stage that divides weights and offloads.

    Attributes:
        kept: what this rank keeps of weights that its stage divides, by bucket and piece: masters, or where other
            pipelines hold them, too, or host memory has them, copies in the parameters' dtype.
        updates: how often the masters were changed; those of all ranks are equal between steps.
        gather: the way of new values to the holders.
        after_update: called when they were, before their values are sent; whether it has changed them, too.
    """

    def __init__(
        self, sync: GradientSync, build: OptimizerFactory, offload: bool = False, apart: Collection[str] = (),
        divided: FirstValues | None = None, host: HostRows | None = None,
    ) -> None:  # fmt: skip
        self.sync, self.offload, self._apart, self.updates = sync, offload, frozenset(apart), 0
        self.after_update: Callable[[], bool] = lambda: False
        self._params = {name: p.detach() for name, p in sync.params.items() if name not in sync.divided_names}
        # By bucket in which sums go on, arrays of what this rank keeps, which new values come into.
        self._arrays: dict[int, Mapping[str, torch.Tensor]] = {}
        self.kept: dict[int, list[torch.Tensor]] = {}
        self.gather = ParameterGather(sync, self._values)
        for index, exchange in sync.divided.items():
            if exchange.bucket.onward is not None:
                assert divided is not None
                self.kept[index] = self._at_home(divided(exchange.bucket.names, exchange.pieces), host)
                self._arrays[exchange.bucket.onward] = by_key(exchange.pieces, self.kept[index])
        self.masters = []
        for exchange in sync.exchanges:
            if exchange.bucket.weights is not None:
                assert divided is not None
                values = divided(exchange.bucket.names, exchange.pieces)
                wide = [_widened(x) for x in values]
                self.masters.append(self._at_home(wide, host))
                same = host is None or all(a is b for a, b in zip(wide, values, strict=True))
                self.kept[exchange.bucket.index] = self.masters[-1] if same else self._at_home(values, host)
            else:
                self.masters.append([self._master(exchange, piece, divided) for piece in exchange.pieces])
        # By bucket and piece: its place in the model, and whether the update can write the new values there.
        self._places = {e.bucket.index: [(self._view(e, p), self._copied(e, p)) for p in e.pieces]
                        for e in sync.exchanges if e.bucket.weights is None}  # fmt: skip
        groups = self._groups()
        self.inner = build(groups) if groups else None

    @staticmethod
    def _at_home(values: list[torch.Tensor], host: HostRows | None) -> list[torch.Tensor]:
        return values if host is None else [host.memory.keep(x) for x in values]

    def _groups(self) -> list[dict[str, object]]:
        """Masters that are decayed and not, with and without a place in the model that the update can write too."""
        groups: dict[tuple[bool, bool, bool], dict[str, Any]] = {}
        for exchange, masters in zip(self.sync.exchanges, self.masters, strict=True):
            for piece, master in zip(exchange.pieces, masters, strict=True):
                if piece.name in self._apart:
                    continue
                decay = len(piece.box.lo) > 1 and not piece.name.endswith(("bias", f"{MAGNITUDE}.weight"))
                copied = exchange.bucket.weights is None and self._copied(exchange, piece)
                matrices = exchange.bucket.matrices
                group = groups.setdefault((matrices, not decay, copied), {"params": [], "decay": decay})
                if matrices:
                    group["matrices"] = self.sync.params[piece.name].dtype
                group["params"].append(master)
                if copied:
                    group.setdefault("copies", []).append(self._view(exchange, piece))
        return [groups[key] for key in sorted(groups)]

    def _values(self, exchange: BucketExchange) -> Mapping[str, torch.Tensor]:
        """What new values of a bucket come into: the model's parameters, or what the rank keeps of divided ones."""
        return self._arrays.get(exchange.bucket.index, self._params)

    def _view(self, exchange: BucketExchange, piece: OwnedPiece) -> torch.Tensor:
        """The piece inside the model's parameter, or what that has of it."""
        return self._values(exchange)[piece.key][piece.slices]

    def _copied(self, exchange: BucketExchange, piece: OwnedPiece) -> bool:
        """Whether the update itself can write the new values there: one piece of memory, beside the master's."""
        view = self._view(exchange, piece)
        return piece.held and not self.offload and view.is_contiguous() and not in_place(view)

    def in_place(self, exchange: BucketExchange, piece: OwnedPiece) -> bool:
        """Whether the piece's master is the memory that new values come into."""
        if self.offload or exchange.bucket.weights is not None:
            return False
        return piece.held and in_place(self._view(exchange, piece))

    def _master(self, exchange: BucketExchange, piece: OwnedPiece, first: FirstValues | None) -> torch.Tensor:
        if not piece.held:
            assert first is not None
            return _widened(first([piece.name], [piece])[0])
        view = self._view(exchange, piece)
        if self.offload:
            return view.to("cpu", torch.promote_types(view.dtype, torch.float32), copy=True).contiguous()
        if in_place(view):
            return view
        return view.to(torch.promote_types(view.dtype, torch.float32), copy=True)

    def owned(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """(logical name, box, master values) of everything this rank owns."""
        for exchange, masters in zip(self.sync.exchanges, self.masters, strict=True):
            for piece, master in zip(exchange.pieces, masters, strict=True):
                yield piece.name, piece.box, master

    def set_rates(self, lr: float, weight_decay: float) -> None:
        for group in self.inner.param_groups if self.inner else ():
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decay"] else 0.0

    @torch.no_grad()
    def step(self, grads: list[list[torch.Tensor]], coefficient: float, ahead: bool = False) -> None:
        """Scale the owned gradients by ``coefficient``, update, and send the new values to all holders.

        Args:
            grads: per exchange and piece, as :meth:`GradientSync.finish` returns them; used up, to free their memory
                before the new values travel.
            ahead: some values may come after this has returned: whoever reads parameters before the next forward
                calls ``gather.finish()``.
        """
        flat = [g for per in grads for g in per]
        scaling = isinstance(self.inner, ScalingOptimizer) and not self.offload
        if coefficient != 1.0 and flat and not scaling:
            torch._foreach_mul_(flat, coefficient)
        for masters, per in zip(self.masters, grads, strict=True):
            for master, grad in zip(masters, per, strict=True):
                master.grad = grad.to(master.device, master.dtype).contiguous() if self.offload else grad
        if isinstance(self.inner, ScalingOptimizer):
            self.inner.step(coefficient if scaling else 1.0)
        elif self.inner is not None:
            self.inner.step()
        self.updates += 1
        for masters, per in zip(self.masters, grads, strict=True):
            per.clear()
            for master in masters:
                master.grad = None
        flat.clear()
        changed = self.after_update()
        self.all_gather(isinstance(self.inner, ScalingOptimizer) and not changed, ahead)

    @torch.no_grad()
    def all_gather(self, copied: bool = False, ahead: bool = False) -> None:
        """Make every holder's parameters equal to the owners' masters, but for divided weights, which are gathered when
        they are used; ``copied``: the update wrote what it can; ``ahead``: of :meth:`step`."""
        masters = {e.bucket.index: m for e, m in zip(self.sync.exchanges, self.masters, strict=True)}
        for bucket, values in masters.items():
            if (kept := self.kept.get(bucket, values)) is not values:
                torch._foreach_copy_(kept, values)
        self.gather.run(masters, lambda e: self._keep_own(e, masters[e.bucket.index], copied), ahead)

    def _keep_own(self, exchange: BucketExchange, masters: list[torch.Tensor], copied: bool) -> None:
        places = self._places[exchange.bucket.index]
        for piece, master, (weights, written) in zip(exchange.pieces, masters, places, strict=True):
            if not piece.held:
                weights.copy_(master[piece.inside])
            elif (self.offload or not in_place(weights)) and not (copied and written):
                weights.copy_(master)


def _widened(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def in_place(view: torch.Tensor) -> bool:
    """Whether a piece of a parameter can be its own master: full precision and contiguous."""
    return view.dtype not in (torch.float16, torch.bfloat16) and view.is_contiguous()


def owned_norm(
    grads: Sequence[Sequence[torch.Tensor]], l2norm: Callable[..., torch.Tensor], device: torch.device
) -> float | torch.Tensor:
    """Norm of all owned gradients (each element counted by its one owner), by an operator ``l2norm`` of ``device``, of
    those in host memory by torch: a tensor [] there, 0.0 where this rank owns none."""
    flat = [g for per in grads for g in per if g.numel()]
    here, away = ([g for g in flat if (g.device.type == device.type) == same] for same in (True, False))
    if not away:
        return l2norm(here) if here else 0.0
    away_norm = torch.stack(torch._foreach_norm(away)).norm().to(device)
    return torch.stack([away_norm, l2norm(here)]).norm() if here else away_norm


def scales_and_norms(
    groups: Sequence[torch.Tensor], nominal: float, first_sample: int, batch_size: int
) -> list[tuple[float, float]]:
    """Of ranks whose gradients are summed together: (factor that makes a sum of gradients their mean, norm of that).

    Args:
        groups: of the ranks of each such group, fp64 [ranks, 3 or more]: loss sum, tokens and squared norm.
        nominal: tokens that sums of gradients are divided by as they are, over the loss scale.
        first_sample, batch_size: of the step, for messages.

    Raises:
        UserError: no token of a group counts in the loss.
    """
    scales: list[tuple[float, float]] = []
    for rows in groups:
        tokens, square = rows[:, 1:3].sum(0).tolist()
        if tokens == 0:
            samples = f"{first_sample}..{first_sample + batch_size - 1}"
            island_text = f" on island {len(scales)}" if len(groups) > 1 else ""
            raise UserError(f"no token of samples {samples} counts in the loss{island_text}")
        scale = nominal / tokens
        scales.append((scale, math.sqrt(square) * scale if math.isfinite(square) else math.inf))
    return scales
