"""How often the tokens of a run chose each expert: a file that a run writes (--routing-stats) for the planner.

    {"version": 1, "model_hash": "0123456789ab", "tokens": 8192, "layers": {"0": [1024, 2048, …], …}}

``tokens``: that passed each layer; a layer's counts, one per expert, sum to as many times the experts of a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero_megatron.errors import UserError
from hetero_megatron.plan.made_for import model_hash
from hetero_megatron.utils.files import read_json_object
from hetero_megatron.utils.outputs import write_text
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec, MoE

VERSION = 1
FLAG = "--routing-stats"


@dataclass(frozen=True)
class RoutingStats:
    """Attributes:
    tokens: that were routed in each layer; layers: by layer, how many of them chose each expert.
    """

    tokens: int
    layers: Mapping[int, tuple[int, ...]]


def write_routing_stats(path: str, stats: RoutingStats, spec: ModelSpec) -> None:
    """Replace the file as a whole; UserError if it cannot be written."""
    layers = {str(layer): list(counts) for layer, counts in sorted(stats.layers.items())}
    known = {"version": VERSION, "model_hash": model_hash(spec.base), "tokens": stats.tokens, "layers": layers}
    write_text(path, FLAG, json.dumps(known) + "\n")


def read_routing_stats(path: str, spec: ModelSpec) -> RoutingStats:
    """Read and check the file.

    Raises:
        UserError: it is malformed, or of another model than ``spec``.
    """
    found = read_json_object(path, FLAG)
    if found.get("version") != VERSION:
        said = found.get("version")
        raise UserError("unknown version", field="version", value=said, accepted=str(VERSION), where=path)
    if found.get("model_hash") != model_hash(spec.base):
        raise UserError(
            f"is of another model than {spec.name} ({model_hash(spec.base)})", field="model_hash",
            value=found.get("model_hash"), accepted="what a run with this model wrote", where=path,
        )  # fmt: skip
    assert spec.moe is not None, "the hash is of a model with experts"
    tokens: Any = found.get("tokens")
    layers = found.get("layers")
    if not _is_count(tokens) or tokens == 0:
        raise UserError("must be a count", field="tokens", value=tokens, accepted="an integer >= 1", where=path)
    wanted = [str(i) for i, kind in enumerate(spec.layers) if kind.mlp == "moe"]
    if not isinstance(layers, dict) or set(layers) != set(wanted):
        said = ", ".join(layers) if isinstance(layers, dict) else None
        accepted = ", ".join(wanted)
        raise UserError("must name the layers with experts", field="layers", value=said, accepted=accepted, where=path)
    for layer, counts in layers.items():
        _check_counts(counts, tokens, spec.moe, f"layers.{layer}", path)
    return RoutingStats(tokens, {int(layer): tuple(layers[layer]) for layer in wanted})


def _check_counts(counts: object, tokens: int, moe: MoE, field: str, path: str) -> None:
    """Refuse what no run of a model with these experts can have counted."""
    if not isinstance(counts, list) or len(counts) != moe.num_experts:
        said = plural(len(counts), "count") if isinstance(counts, list) else counts
        accepted = f"a list of one count for each of the model's {moe.num_experts} experts"
        raise UserError("not one count per expert", field=field, value=said, accepted=accepted, where=path)
    for expert, count in enumerate(counts):
        if not _is_count(count) or count > tokens:
            raise UserError(
                f"no count of how many of {plural(tokens, 'token')} chose an expert", field=f"{field}[{expert}]",
                value=count, accepted=f"an integer from 0 to {tokens}", where=path,
            )  # fmt: skip
    if sum(counts) != tokens * moe.top_k:
        raise UserError(
            f"counts sum to {sum(counts)}", field=field, where=path,
            accepted=f"a sum of {tokens * moe.top_k}: {plural(tokens, 'token')}, {plural(moe.top_k, 'expert')} each",
        )  # fmt: skip


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60
