"""One random case: a model, a plan, data, an optimizer; trained by the runtime and by a plain Hugging Face loop."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch, BatchOptions, make_batch
from hetero_megatron.data.sample import Sample
from hetero_megatron.layout import Box
from hetero_megatron.ops import SPECS
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.fp8_checks import fp8_fits
from hetero_megatron.spec import Dropout, LogicalTensor, ModelSpec
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.spec.moe import UNBALANCED, Balancing
from hetero_megatron.training.rank_platform import plan_for, sizes_follow_data
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support.hf_dropout import HFDropout
from tests.support.hf_reference import hf_grads, hf_loss_sum, hf_to_logical, make_hf
from tests.support.moe_reference import BalancedModel
from tests.support.mtp_reference import add_predictions, prediction_losses
from tests.support.muon_reference import LogicalMuon, our_muon
from tests.support.random_plans import divide_weights, random_features, random_model, random_plan
from tests.support.vendors import load_as_asked, with_attention

EOD = 0
STEPS = 2  # the second has the weights, the moments and the experts' bias of the first
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Everything that both sides need; small enough to send to the rank processes."""

    seed: int
    ranks: int
    model: dict[str, Any]
    plan: dict[str, Any]
    dtype: str = "fp64"
    optimizer: str = "adamw"
    momentum: float = 0.9  # of sgd
    packed: bool = False
    masked: bool = False
    lr: float = 1e-2
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    chunked_loss: bool = False
    dropout: Dropout = Dropout()
    balancing: Balancing | None = None  # of experts
    fp8: Fp8 | None = None
    router: dict[str, Any] = field(default_factory=dict)  # options that the family of the model does not have
    predictions: int = 0  # modules that predict further tokens
    prediction_factor: float = 0.3

    def describe(self) -> str:
        kind = f"seed {self.seed}, {self.dtype}, {self.optimizer}, packed={self.packed}, chunked={self.chunked_loss}"
        experts = f", balancing={self.balancing}, router={self.router}" if self.balancing is not None else ""
        return f"{kind}, {self.dropout}, model={self.model}, plan={self.plan}{experts}"


def random_case(seed: int, dtype: str = "fp64", most_pipelines: int = 3, divided: bool = False) -> Case:
    rng, rates = random.Random(seed), random.Random(f"dropout {seed}")
    model = random_model(rng)
    if dtype != "bf16" and model["model_type"] != "gpt2":
        # Of nearly equal scores another expert may be taken in fp32.
        model |= random_features(random.Random(f"features {seed}"), model, experts=dtype == "fp64")
    ranks = rng.choice([1, 2, 3, 4, 4, 5, 6, 7, 8, 8])
    layers = model.get("num_hidden_layers") or model["n_layer"]
    heads = model.get("num_attention_heads") or model["n_head"]
    plan = random_plan(rng, layers, heads, seq_length=rng.randint(8, 16), ranks=ranks, most_pipelines=most_pipelines)
    if divided:
        divide_weights(random.Random(f"weights {seed}"), plan, heads)
    return Case(
        seed, ranks, model, plan, dtype,
        optimizer=rng.choice(["adamw", "adamw", "sgd"]),
        packed=rng.random() < 0.4,
        masked=rng.random() < 0.3,
        clip_grad=rng.choice([0.0, 1.0, 0.05]),
        chunked_loss=rng.random() < 0.3,
        # AdamW turns a gradient that is rounding noise into a full step, so fp32 weights differ by a share of lr.
        lr=1e-2 if dtype == "fp64" else 1e-3,
        dropout=Dropout(rates.choice([0.0, 0.1, 0.5]), rates.choice([0.0, 0.1, 0.5])),
    )  # fmt: skip


class RandomSamples:
    """Packed samples of random tokens with document ends, a function of (seed, index)."""

    def __init__(self, case: Case, vocab: int) -> None:
        self.case, self.vocab = case, vocab

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng([self.case.seed, index])
        length = self.case.plan["seq_length"]
        tokens = rng.integers(1, self.vocab, length + 1)
        ends = rng.random(length + 1) < 0.2
        tokens[ends] = EOD
        starts = np.flatnonzero(tokens[:-1] == EOD) + 1
        documents = np.concatenate([[0], starts[starts < length]]).astype(np.int32)
        return Sample(tokens.astype(np.int64), documents)

    def fetch(self, indices: Any) -> Batch:
        case = self.case
        options = BatchOptions(
            reset_position_ids=case.packed, reset_attention_mask=case.packed, eod_mask_loss=case.masked, eod=EOD
        )
        return make_batch(self, indices, options)


def build_optimizer(case: Case) -> Any:
    if case.optimizer == "muon":
        return our_muon()

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if case.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=case.lr, momentum=case.momentum)
        return torch.optim.AdamW(groups, lr=case.lr, betas=(0.9, 0.95), eps=1e-8)

    return build


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    grads: dict[str, torch.Tensor]  # of the last step, after clipping, by logical name
    weights: dict[str, torch.Tensor]
    loads: list[list[list[int]]] = field(default_factory=list)  # by step and layer, tokens per expert
    balance: list[tuple[float, float]] = field(default_factory=list)  # by step, means over layers
    predictions: list[list[float]] = field(default_factory=list)  # by step, of each module


def _decays(name: str, param: torch.nn.Parameter) -> bool:
    return param.dim() > 1 and not name.endswith(("bias", "_norm.weight", "A_log"))  # Cohere's norms are of each head


def reference(case: Case, dtype: torch.dtype) -> tuple[Outcome, ModelSpec, dict[str, torch.Tensor]]:
    """(outcome, spec, initial weights) of a single-process loop over the Hugging Face model, whole batch at once."""
    hf, spec = make_hf(case.model, case.seed, dtype, "exact" if case.dropout.attention else None)
    if case.predictions:
        spec = add_predictions(hf, spec, case.predictions, case.prediction_factor, case.seed)
    dropout = HFDropout(hf, case.dropout, case.seed)
    balanced = BalancedModel(hf, spec, case.router, case.balancing) if case.balancing is not None else None
    spec = spec if balanced is None else balanced.spec
    if case.fp8 is not None:
        multiply_in_fp8(hf, case.fp8)
    initial = {n: t.detach().clone() for n, t in hf_to_logical(hf, spec).items()}
    data = RandomSamples(case, spec.vocab_size)
    decayed, plain = ([p for n, p in hf.named_parameters() if _decays(n, p) == yes] for yes in (True, False))
    groups = [
        {"params": decayed, "weight_decay": case.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if case.optimizer == "muon":
        optimizer: Any = LogicalMuon(hf, spec, case.lr, case.weight_decay)
    else:
        optimizer = build_optimizer(case)(groups)
    batch_size = case.plan["global_batch_size"]
    losses, norms, loads, balance, predictions = [], [], [], [], []
    for step in range(STEPS):
        batch = data.fetch(range(step * batch_size, (step + 1) * batch_size))
        optimizer.zero_grad()
        dropout.begin(step + 1, step * batch_size)
        further, masks = torch.zeros(()), list[torch.Tensor]()
        if case.predictions:
            (loss_sum, *sums), masks = prediction_losses(hf, batch, case.predictions)
            predictions.append([x.item() / batch.num_loss_tokens() for x in sums])
            further = case.prediction_factor / case.predictions * torch.stack(sums).sum() / batch.num_loss_tokens()
        else:
            loss_sum = hf_loss_sum(hf, batch.tokens, batch.labels, batch.positions, batch.documents, batch.loss_mask)
        loss = loss_sum / batch.num_loss_tokens()
        if balanced is None:
            (loss + further).backward()
        else:
            mask = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask
            sequence, z = balanced.losses(mask, masks if spec.layer(spec.num_layers).mlp == "moe" else ())
            rates = balanced.balancing
            (loss + further + rates.sequence_loss * sequence + rates.z_loss * z).backward()
            loads.append(balanced.loads())
            balance.append((sequence.item() / len(loads[-1]), z.item() / len(loads[-1])))
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), case.clip_grad or float("inf"))
        grads = {n: g.clone() for n, g in hf_grads(hf, spec).items()}
        optimizer.step()
        if balanced is not None:
            balanced.move_bias()
        losses.append(loss.item())
        norms.append(float(norm))
    weights = {n: t.detach() for n, t in hf_to_logical(hf, spec).items()}
    return Outcome(losses, norms, grads, weights, loads, balance, predictions), spec, initial


def multiply_in_fp8(hf: torch.nn.Module, fp8: Fp8) -> None:
    """Give the linear modules of a Hugging Face model's layers the definition of a product in fp8."""
    definition = SPECS[fp8.operator].definition

    def forward(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return definition(x, module.weight, module.bias, fp8.hybrid)[0]  # type: ignore[no-any-return]

    for name, module in hf.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.forward = partial(forward, module)  # type: ignore[method-assign]


def run_rank(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: dict[str, np.ndarray]) -> dict[str, Any]:
    """One rank of the runtime; returns what it saw, with the box of every array."""
    plan = with_attention(plan_for(plan, comm.islands), comm.device)
    load_as_asked(comm, sizes_follow_data(plan, spec, case.packed))
    compiled = CompiledPlan(plan, spec, muon=case.optimizer == "muon")
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return {}

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    options = RuntimeOptions(
        logits_bytes=4000 if case.chunked_loss else LOGITS_BYTES, balancing=case.balancing or UNBALANCED,
        fp8=case.fp8, dropout=case.dropout, seed=case.seed,
    )  # fmt: skip
    runtime = Runtime(compiled, comm, DTYPES[case.dtype], initialize, build_optimizer(case), options=options)
    data = RandomSamples(case, spec.vocab_size)
    assert runtime.optimizer is not None
    grads: list[tuple[str, Box, np.ndarray]] = []
    step = runtime.optimizer.step

    def recording_step(per: Any, coefficient: float, ahead: bool) -> None:
        grads.clear()
        for exchange, tensors in zip(runtime.sync.exchanges, per, strict=True):
            for piece, tensor in zip(exchange.pieces, tensors, strict=True):
                grads.append((piece.name, piece.box, (tensor * coefficient).cpu().numpy()))
        step(per, coefficient, ahead)

    runtime.optimizer.step = recording_step  # type: ignore[method-assign]
    batch = plan.global_batch_size
    rates = case.lr, case.weight_decay, case.clip_grad
    stats = [
        runtime.train_step(data.fetch, i * batch, batch, *rates, step=i + 1, ahead=i + 1 < STEPS)
        for i in range(STEPS)
    ]
    with runtime.whole_weights():
        boxes = runtime.stage_model.boxes
        weights = [
            (n, boxes[n], p.detach().clone().cpu().double().numpy()) for n, p in runtime.sync.params.items()
        ]
    return {
        "losses": [s.loss for s in stats],
        "norms": [s.grad_norm for s in stats],
        "grads": grads,
        "weights": weights,
        "routing": [s.routing for s in stats],
        "predictions": [s.predictions for s in stats],
    }


def run_case(case: Case, pool: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    """(reference outcome, what each rank saw)."""
    outcome, spec, initial = reference(case, torch.float64 if case.dtype == "bf16" else DTYPES[case.dtype])
    plan = plan_from_dict(case.plan, spec)
    fp8_fits(plan, spec, case.fp8, case.dtype, None)
    arrays = {n: t.numpy() for n, t in initial.items()}
    return outcome, pool.run(run_rank, case, plan, spec, arrays)[: case.ranks]


@dataclass(frozen=True)
class Tolerance:
    loss: float
    norm: float
    grads: float
    weights: float


TOLERANCES = {
    ("fp64", "adamw"): Tolerance(1e-12, 1e-12, 1e-9, 1e-9),
    ("fp64", "sgd"): Tolerance(1e-12, 1e-12, 1e-9, 1e-9),
    ("fp64", "muon"): Tolerance(1e-12, 1e-12, 1e-9, 1e-9),
    ("fp32", "adamw"): Tolerance(1e-5, 1e-5, 1e-3, 1e-3),
    ("fp32", "sgd"): Tolerance(1e-5, 1e-5, 1e-4, 1e-5),
    # bf16 has 8 bits of mantissa (2^-8 = 4e-3 per rounding); these bounds are a few roundings deep.
    ("bf16", "adamw"): Tolerance(2e-2, 1e-1, 5e-1, 2e-1),
    ("bf16", "sgd"): Tolerance(2e-2, 1e-1, 5e-1, 2e-1),
}


def check_case(case: Case, pool: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    """Assert that every rank's numbers equal the reference within the case's tolerance; both."""
    want, ranks = run_case(case, pool)
    tol = TOLERANCES[case.dtype, case.optimizer]
    covered: dict[str, np.ndarray] = {n: np.zeros(t.shape, dtype=np.int64) for n, t in want.grads.items()}
    for rank, got in enumerate(ranks):
        where = f"rank {rank}: {case.describe()}"
        np.testing.assert_allclose(got["losses"], want.losses, rtol=tol.loss, atol=0, err_msg=f"loss, {where}")
        if case.predictions:
            np.testing.assert_allclose(got["predictions"], want.predictions, rtol=tol.loss, err_msg=where)
        # AdamW divides by the size of a gradient, so it amplifies the rounding noise of elements that are nearly zero:
        # after a step their weights differ by that, and so does the next gradient (all schedules and one process).
        later = 100 * tol.norm if case.dtype != "bf16" and case.optimizer != "sgd" else tol.norm
        bounds = np.array([tol.norm] + [later] * (STEPS - 1)) * want.norms
        assert (np.abs(np.subtract(got["norms"], want.norms)) <= bounds).all(), f"{got['norms']} {want.norms}, {where}"
        for name, box, _ in got["grads"]:
            covered[name][box.slices()] += 1
        for kind, expected, bound in (("grads", want.grads, tol.grads), ("weights", want.weights, tol.weights)):
            for name, box, array in got[kind]:
                # A key bias has zero true gradient (softmax ignores a shift), so what is left is rounding noise,
                # which AdamW divides by its own size: only its fp64 gradient and SGD weights can be compared.
                noise = case.dtype != "fp64" or (kind == "weights" and case.optimizer != "sgd")
                if name.endswith("k_proj.bias") and noise:
                    continue
                part = expected[name].double().numpy()
                # Relative to the tensor's largest entry: a key bias has zero true gradient, pure noise.
                scale = max(float(np.abs(part).max()), 1e-3)
                error = np.abs(array - part[box.slices()]).max(initial=0.0) / scale
                assert error <= bound, f"{kind} of {name} {box}: error {error:.3g} > {bound:g}; {where}"
    for name, count in covered.items():
        assert (count == 1).all(), f"{name}: elements with no owner or several: {case.describe()}"
    return want, ranks


def fixed_case(model: dict[str, Any], plan: dict[str, Any], **changes: Any) -> Case:
    ranks = 1 + max(r for p in plan["pipelines"] for s in p["stages"] for r in s["ranks"])
    return replace(Case(seed=7, ranks=ranks, model=model, plan=plan), **changes)
