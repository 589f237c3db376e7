"""Adapters of experts in PEFT's form: one pair of matrices for the parameter that holds all experts of a layer.

transformers keeps gate and up of all experts in one parameter, ``gate_up_proj`` (without gates, ``up_proj``), and
``down_proj`` in another; ``target_parameters`` names them. Of a parameter with E experts PEFT stores
A [E x rank, inputs] and B [outputs, rank x E]. An adapter of gate and one of up are one of twice the rank there: A has
the ranks of both, and B is 0 where the ranks of one meet the outputs of the other, as PEFT itself joins them.

Models of before transformers 5 had modules of their own for every expert (``experts.3.gate_proj``), and there are
adapters with their names; these are read, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.checkpoint.names import hf_source
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, logical_tensors
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.lora import MLP_TARGETS
from hetero_megatron.spec.tensors import expert_tensor

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def parameters(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """A parameter of transformers' experts -> the projections that it holds; none of a dense model."""
    if spec.moe is None:
        return {}
    return {GATE_UP if spec.gated else "up_proj": spec.mlp_projections[:-1], DOWN: (DOWN,)}


def parent(spec: ModelSpec) -> str:
    """Where they are in a layer of transformers."""
    return f"{FAMILIES[spec.hf_model_type].names.experts_in}.experts"


@dataclass(frozen=True)
class ExpertSource(HFSource):
    """Where the A [experts, rank, inputs] or B [experts, outputs, rank] of one projection is in a stored tensor.

    Its outputs are rows of B from ``start`` on in steps of ``step``.

    Args:
        of_b: it is B; experts: of the layer.
        ranks: of the stored tensor, of which this projection has those from ``first`` on.
        outputs: of the stored tensor.
    """

    of_b: bool = False
    experts: int = 1
    ranks: int = 1
    first: int = 0
    outputs: int = 0

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        return (self.outputs, self.ranks * self.experts) if self.of_b else (self.experts * self.ranks, logical[2])

    def view(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """A as [experts, ranks, inputs], B as [outputs, ranks, experts]."""
        return (stored[0], self.ranks, self.experts) if self.of_b else (self.experts, self.ranks, stored[1])

    def order(self, dims: int) -> tuple[int, ...]:
        return (1, 2, 0) if self.of_b else (0, 1, 2)

    def slices(self, box: Box) -> tuple[slice, ...]:
        experts, second, third = box.slices()
        if not self.of_b:
            return experts, slice(self.first + second.start, self.first + second.stop), third
        rows = slice(self.start + second.start * self.step, self.start + second.stop * self.step, self.step)
        return rows, slice(self.first + third.start, self.first + third.stop), experts

    def read(self, file: Any, box: Box) -> torch.Tensor:
        """The values of a box, from an open safetensors file."""
        stored, slices = file.get_slice(self.name), self.slices(box)
        if self.of_b:
            rows = stored[slices[0].start : slices[0].stop][:: self.step].unflatten(1, (self.ranks, self.experts))
            return rows[:, slices[1], slices[2]].permute(2, 0, 1)  # type: ignore[no-any-return]
        rows = stored[slices[0].start * self.ranks : slices[0].stop * self.ranks, slices[2]]
        return rows.unflatten(0, (-1, self.ranks))[:, slices[1]]  # type: ignore[no-any-return]

    def is_mixed(self, file: Any, rank: int) -> bool:
        """Whether a B of gate and up, joined, has values where the ranks of the one of ``rank`` meet the other."""
        if not self.of_b or self.ranks == rank:
            return False
        rows = file.get_tensor(self.name)[self.start :: self.step][: self.outputs // 2]
        other_experts = rows.unflatten(1, (self.ranks, self.experts))[:, rank - self.first :][:, :rank]
        return bool(other_experts.any())


def expert_source(spec: ModelSpec, tensor: LogicalTensor, prefix: str, joined: bool, field: str) -> ExpertSource:
    """Of the A or B of all experts of a layer. UserError: peft's form of it is not that of the other families.

    Args:
        joined: gate's ranks stand before up's; else both have the same A.
    """
    assert spec.lora is not None and spec.moe is not None
    layer, _, _, projection, kind, _ = tensor.name.rsplit(".", 5)
    fused = projection != DOWN and spec.gated
    # Each parameter has a wrapper of its own around the experts; the first one's, by name, is the outer one.
    nested = projection != DOWN and DOWN in spec.lora.targets
    name = f"{prefix}{layer}.{parent(spec)}.{'base_layer.' if nested else ''}{kind}.weight"
    inter = FAMILIES[spec.hf_model_type].names.experts
    if inter is not None and not inter.interleaved:  # [experts, inputs, outputs], and does not tell peft that it is
        raise UserError(
            f"peft takes inputs and outputs of {spec.hf_model_type}'s experts for each other", field=field,
            value=projection, accepted="adapters of attention, or --merge-lora and --save-hf",
        )  # fmt: skip
    second, of_b, rank, start, step = fused and projection == "up_proj", kind == "lora_B", spec.lora.rank, 0, 1
    if of_b and fused:
        interleaved = inter is not None and inter.interleaved
        step = 2 if interleaved else 1
        start = second * (1 if interleaved else spec.moe.ffn_hidden_size)
    ranks = 2 * rank if fused and joined else rank
    outputs = tensor.shape[1] * (2 if fused else 1)
    return ExpertSource(
        name, start, step=step, of_b=of_b, experts=spec.moe.num_experts, ranks=ranks,
        first=rank if second and joined else 0, outputs=outputs,
    )  # fmt: skip


def single_source(spec: ModelSpec, module: str, adapter: str, prefix: str, field: str) -> HFSource:
    """Of an ``adapter`` of one expert, whose module is ``model.layers.0.mlp.experts.3.gate_proj``. UserError: the
    family never had such modules."""
    assert spec.lora is not None
    source = hf_source(spec, f"{module}.weight")
    if source.expert is not None:
        problem = f"Hugging Face's {spec.hf_model_type} has no modules of single experts"
        accepted = f"adapters of {' and '.join(parameters_of(spec))}"
        if spec.lora.dora:
            problem += ", of which alone peft knows DoRA"
            accepted = f"targets other than {', '.join(MLP_TARGETS)}, or --merge-lora and --save-hf"
        raise UserError(problem, field=field, value=module, accepted=accepted)
    stored = FAMILIES[spec.hf_model_type].names.in_transformers(source.name)
    return HFSource(f"{prefix}{stored.removesuffix('weight')}{adapter}")


def parameters_of(spec: ModelSpec) -> list[str]:
    """target_parameters of adapter_config.json."""
    assert spec.lora is not None
    held = parameters(spec).items()
    return [f"{parent(spec)}.{name}" for name, targets in held if targets[0] in spec.lora.targets]


def single_keys(spec: ModelSpec, others: list[str]) -> dict[str, Any]:
    """Keys of adapter_config.json for adapters of experts that are modules; ``others``: target_modules beside them.
    Projections of dense layers, and of what all tokens share, have the same names, and no adapters."""
    assert spec.lora is not None
    wanted = [name for name in spec.lora.targets if name in MLP_TARGETS]
    experts, left_out = dict[str, None](), dict[str, None]()
    for tensor in logical_tensors(spec.base):
        module, _, kind = tensor.name.rpartition(".")
        if kind != "weight" or module.rpartition(".")[2] not in wanted:
            continue
        stored = hf_source(spec, expert_tensor(tensor, 0).name if tensor.per_expert else tensor.name).name
        parent, name = stored.split(".")[-3:-1]
        if tensor.per_expert:
            experts[name] = None
        else:
            left_out[f"{parent}.{name}"] = None
    keys: dict[str, Any] = {"target_modules": [*others, *experts]}
    return keys | ({"exclude_modules": [*left_out]} if left_out else {})


def doubled(lora: Lora) -> tuple[dict[str, int], dict[str, float]]:
    """rank_pattern and alpha_pattern with which gate and up, joined, count as each by itself."""
    return {rf".*\.{GATE_UP}": 2 * lora.rank}, {rf".*\.{GATE_UP}": lora.alpha * (math.sqrt(2) if lora.rslora else 2)}
