"""peft's adapters as the independent reference: the Hugging Face model with them, and their values by logical name."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import numpy as np
import peft
import torch
from peft.tuners.lora import Linear as LoraLinear

from hetero_megatron.checkpoint.adapter import adapter_table
from hetero_megatron.checkpoint.names import module_names
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.ops.dropout import ADAPTER, Draws, definition
from hetero_megatron.spec import ModelSpec, trained_tensors
from hetero_megatron.spec.adapter_modules import all_modules
from hetero_megatron.spec.adapter_places import modules
from hetero_megatron.spec.lora import EVERY_TARGET, MLP_TARGETS
from tests.support.hf_reference import hf_to_logical


def targets_outside_experts(spec: ModelSpec) -> list[str]:
    """All that may have an adapter; of a mixture of experts, what tokens do not choose or share."""
    return [name for name in all_modules(spec) if spec.moe is None or name not in MLP_TARGETS]


def peft_places(spec: ModelSpec) -> dict[str, tuple[str, list[int] | None]]:
    """Of adapters outside of experts, by logical name: peft's parameter, and rows of it; None: all, in order."""
    table, found = adapter_table(spec) if has_files(spec) else {}, {}
    for tensor in trained_tensors(spec):
        if tensor.per_expert:
            continue
        name, rows = f"base_model.model.{tensor.name}", None
        if tensor.name in table:
            name, source = table[tensor.name].name, table[tensor.name]
            name += "" if name.endswith(".weight") else ".weight"
            if source.rows is not None:
                runs = [stored[0] for _, stored in source.runs(Box.whole(tensor.shape))]
                rows = [row for run in runs for row in range(run.start, run.stop)]
        for kind in ("lora_A", "lora_B", "lora_magnitude_vector"):
            name = name.replace(f"{kind}.", f"{kind}.default.")
        found[tensor.name] = name, rows
    return found


def has_files(spec: ModelSpec) -> bool:
    """Whether peft's form is known of all adapters; of the others, names are Llama's."""
    try:
        adapter_table(spec)
    except UserError:
        return False
    return True


def peft_model(model: torch.nn.Module, spec: ModelSpec, values: dict[str, np.ndarray]) -> Any:
    """The Hugging Face model with peft's adapters, whose values are given by logical name."""
    lora = spec.lora
    assert lora is not None
    common = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "lora_dropout": 0.0}
    common |= {"use_dora": lora.dora}
    if single := single_experts(spec):
        keep_single_experts(model, spec)
    names = module_names(spec) if spec.hybrid else {}
    dense = [names.get(t, t) for t in lora.targets if spec.moe is None or t not in MLP_TARGETS]
    dense += single
    chosen = {"target_modules": dense} | expert_config(spec) | (site_config(spec) if lora.sites else {})
    config = peft.LoraConfig(task_type="CAUSAL_LM", **common, **chosen)
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()
    for param in wrapped.parameters():
        if param.requires_grad and spec.moe is not None:
            param.data.zero_()
    views, params, places = peft_values(wrapped, spec), dict(wrapped.named_parameters()), peft_places(spec)
    with torch.no_grad():
        for name, view in views.items():
            if single and ".experts." in name:  # no view
                for param, value in zip(single_params(params, name), values[name], strict=True):
                    param.data.copy_(torch.from_numpy(value))
                continue
            param, rows = places.get(name, ("", None))
            if rows is not None:  # no view
                params[param].data[rows] = torch.from_numpy(values[name])
            else:
                view.copy_(torch.from_numpy(values[name]))
    return wrapped


class SingleExperts(torch.nn.Module):
    """Experts as modules, as transformers had them before its version 5: peft knows no DoRA of parameters.

    Args:
        fused: the experts of a layer, as transformers has them now.
        projections: (gate,) up and down, each a weight [experts, outputs, inputs] and a bias [experts, outputs] or
            None.
    """

    def __init__(
        self, fused: torch.nn.Module, projections: dict[str, tuple[torch.Tensor, torch.Tensor | None]]
    ) -> None:
        super().__init__()
        self.activate = fused._apply_gate if hasattr(fused, "_apply_gate") else None
        self.act_fn = getattr(fused, "act_fn", None)
        self.count = len(projections["down_proj"][0])
        for e in range(self.count):
            expert = torch.nn.Module()
            for name, (weight, bias) in projections.items():
                linear = torch.nn.Linear(*reversed(weight.shape[1:]), bias=bias is not None, dtype=weight.dtype)
                linear.weight.data.copy_(weight[e])
                if bias is not None:
                    linear.bias.data.copy_(bias[e])
                setattr(expert, name, linear)
            self.add_module(str(e), expert)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, h], chosen and weights [tokens, k] -> [tokens, h]."""
        y = torch.zeros_like(x)
        for e in range(self.count):
            token, k = torch.where(chosen == e)
            expert: Any = self.get_submodule(str(e))
            up = expert.up_proj(x[token])
            if not hasattr(expert, "gate_proj"):
                inner = self.act_fn(up)
            else:
                gate = expert.gate_proj(x[token])
                inner = self.act_fn(gate) * up if self.act_fn is not None else self._clamped(gate, up)
            y = y.index_add(0, token, expert.down_proj(inner) * weights[token, k, None])
        return y

    def _clamped(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        assert self.activate is not None
        return self.activate(torch.stack([gate, up], -1).flatten(-2))  # type: ignore[no-any-return]


def single_experts(spec: ModelSpec) -> list[str]:
    """target_modules of experts with DoRA."""
    assert spec.lora is not None
    if spec.moe is None or not spec.lora.dora:
        return []
    experts = range(spec.moe.num_experts)
    return [f"experts.{e}.{name}" for name in spec.lora.targets if name in MLP_TARGETS for e in experts]


def keep_single_experts(model: torch.nn.Module, spec: ModelSpec) -> None:
    """Give a Hugging Face model experts that are modules, with the same values."""
    tensors = hf_to_logical(model, spec.base)
    for name, module in list(model.named_modules()):
        if name.endswith(".experts"):
            ours = f"model.layers.{name.split('.layers.')[1].split('.')[0]}.mlp.experts"
            projections = {
                t: (tensors[f"{ours}.{t}.weight"], tensors.get(f"{ours}.{t}.bias")) for t in spec.mlp_projections
            }
            model.set_submodule(name, SingleExperts(module, projections))
    config: Any = model.config
    config.model_type = "experts as modules"  # of known types peft takes experts' modules for parameters


def keep_fused_experts(model: torch.nn.Module, like: torch.nn.Module) -> None:
    """The other way round; ``like``: a model whose experts are parameters, which takes the values."""
    for name, fused in list(like.named_modules()):
        if name.endswith(".experts"):
            experts: Any = [one for key, one in model.get_submodule(name).named_children() if key.isdigit()]
            if hasattr(fused, "gate_up_proj"):
                gate_up = [torch.cat([one.gate_proj.weight, one.up_proj.weight]) for one in experts]
                fused.gate_up_proj.data = torch.stack(gate_up)
            else:
                fused.up_proj.data = torch.stack([one.up_proj.weight for one in experts])
            fused.down_proj.data = torch.stack([one.down_proj.weight for one in experts])
            model.set_submodule(name, fused)


def single_params(params: dict[str, torch.nn.Parameter], name: str) -> list[torch.nn.Parameter]:
    """Those of every expert, of a logical tensor over experts."""
    before, after = name.split(".experts.")
    layer, module = before.split("model.layers.")[1].split(".")[0], after
    for kind in ("lora_A", "lora_B", "lora_magnitude_vector"):
        module = module.replace(f"{kind}.", f"{kind}.default.")
    ours = re.compile(rf".*\.layers\.{layer}\..*\.experts\.(\d+)\.{re.escape(module)}")
    found = {int(match[1]): param for key, param in params.items() if (match := ours.fullmatch(key))}
    return [found[e] for e in range(len(found))]


def site_config(spec: ModelSpec) -> dict[str, Any]:
    """Whole names of modules."""
    assert spec.lora is not None
    called = modules(spec)
    names = {
        called[layer, target]: (site.rank, site.alpha)
        for site in spec.lora.sites for layer in site.layers for target in site.targets
    }  # fmt: skip
    ranks, alphas = ({name: both[i] for name, both in names.items()} for i in (0, 1))
    return {"target_modules": [*names], "rank_pattern": ranks, "alpha_pattern": alphas}


def expert_config(spec: ModelSpec) -> dict[str, Any]:
    """Of an adapter of gate and one of up peft makes one of twice the rank."""
    assert spec.lora is not None
    first = {"gate_up_proj": "gate_proj"} if spec.gated else {"up_proj": "up_proj"}
    wanted = first | {"down_proj": "down_proj"}
    found = [f"experts.{theirs}" for theirs, ours in wanted.items() if ours in spec.lora.targets]
    if spec.moe is None or not found or spec.lora.dora:
        return {}
    if not spec.gated:
        return {"target_parameters": found}
    factor = math.sqrt(2) if spec.lora.rslora else 2
    rank, alpha = {"gate_up_proj": 2 * spec.lora.rank}, {"gate_up_proj": factor * spec.lora.alpha}
    return {"target_parameters": found, "rank_pattern": rank, "alpha_pattern": alpha}


def peft_values(wrapped: torch.nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """By logical name, views of peft's parameters: what its documentation calls delta_weight, taken apart; of rows
    of a matrix that holds several projections, copies."""
    assert spec.lora is not None
    params, found, used, r = dict(wrapped.named_parameters()), {}, set(), spec.lora.rank
    places = peft_places(spec)
    for tensor in trained_tensors(spec):
        if not tensor.per_expert:
            name, rows_of_it = places[tensor.name]
            used.add(name)
            found[tensor.name] = params[name].data if rows_of_it is None else params[name].data[rows_of_it]
            continue
        if spec.lora.dora:
            experts = single_params(params, tensor.name)
            used |= {key for key, param in params.items() if any(param is one for one in experts)}
            found[tensor.name] = torch.stack([param.data for param in experts])
            continue
        layer, _, projection, kind, _ = tensor.name.rsplit(".", 4)
        nested = projection != "down_proj" and "down_proj" in spec.lora.targets
        block = "mixer" if spec.hf_model_type == "nemotron_h" else "mlp"
        experts_name = f"{layer.removesuffix('mlp')}{block}.experts"
        name = f"base_model.model.{experts_name}.{'base_layer.' if nested else ''}{kind}.default.weight"
        used.add(name)
        second, rows = projection == "up_proj" and spec.gated, params[name].data
        rank = slice(r, None) if second else slice(r)
        if kind == "lora_A":  # [experts x rank, inputs]
            found[tensor.name] = rows.unflatten(0, (tensor.shape[0], -1))[:, rank]
            continue
        rows = rows.unflatten(1, (-1, tensor.shape[0]))[:, rank].permute(2, 0, 1)  # from [outputs, rank x experts]
        half = slice(None)
        if projection != "down_proj" and spec.gated:
            f = tensor.shape[1]
            half = slice(int(second), None, 2) if spec.hf_model_type == "gpt_oss" else slice(second * f, second * f + f)
        found[tensor.name] = rows[:, half]
    assert used == {n for n, p in params.items() if p.requires_grad}
    return found


class PeftDropout:
    """Makes peft's adapters drop elements of their inputs, with masks that are given, from :meth:`begin` on."""

    def __init__(self, wrapped: torch.nn.Module, rate: float, seed: int) -> None:
        self.seed, self.draws = seed, Draws(seed, 0, 0)
        for name, module in wrapped.named_modules():
            if rate and isinstance(module, LoraLinear):
                layer, *_, projection = name.split(".layers.")[1].split(".")
                projection = "down_proj" if projection == "output_linear" else projection
                place = int(layer), ADAPTER + EVERY_TARGET.index(projection)
                module.lora_dropout["default"] = _Dropped(self, rate, *place)

    def begin(self, step: int, sample: int) -> None:
        self.draws = Draws(self.seed, step, sample)


class _Dropped(torch.nn.Module):
    def __init__(self, of: PeftDropout, rate: float, layer: int, site: int) -> None:
        super().__init__()
        self.of, self.rate, self.place = of, rate, (layer, site)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draws, plain = self.of.draws, torch.ones_like(x if x.dim() == 3 else x.squeeze(1))  # latents: [b, 1, s, r]
        tokens = torch.arange(plain.shape[1])
        (factors,) = definition(plain, tokens, self.rate, draws.key(*self.place), draws.sample, 0)
        return x * factors.view(x.shape)


def keep_apart(wrapped: torch.nn.Module, spec: ModelSpec) -> None:
    """Gradients only of what ``peft_values`` are of: gate's A does not meet up's B."""
    params = dict(wrapped.named_parameters())
    trained = {n: p for n, p in params.items() if p.requires_grad}
    kept = {n: p.data.clone() for n, p in trained.items()}
    for param in trained.values():
        param.data.zero_()
    for name, view in peft_values(wrapped, spec).items():
        view.fill_(1.0)
        if (place := peft_places(spec).get(name)) is not None:
            params[place[0]].data.fill_(1.0)
        elif single_experts(spec):
            for param in single_params(params, name):
                param.data.fill_(1.0)
    for name, param in trained.items():
        param.register_hook(partial(torch.mul, param.data.clone()))
        param.data.copy_(kept[name])


def adapter_values(spec: ModelSpec, seed: int) -> dict[str, np.ndarray]:
    """A as we draw it; B not zero, so that every gradient is there; DoRA's lengths, which begin as the base's, of any
    size."""
    rng, out = np.random.default_rng(seed), {}
    for tensor in trained_tensors(spec):
        if tensor.name.endswith("lora_magnitude_vector.weight"):
            out[tensor.name] = rng.uniform(0.5, 2.0, tensor.shape)
            continue
        drawn = initial_values(tensor, Box.whole(tensor.shape), spec, seed).double().numpy()
        assert (drawn == 0).all() == tensor.name.endswith("lora_B.weight")
        out[tensor.name] = drawn if tensor.name.endswith("lora_A.weight") else rng.normal(0, 0.1, tensor.shape)
    return out
