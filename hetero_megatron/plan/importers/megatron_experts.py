"""Megatron's expert-parallel flags -> groups of a stage.

The ranks of a stage run through tensor, context and data parallel; for the experts they run through expert tensor
parallel (columns of each expert), expert parallel (which experts), and replicas of both. Where a group of experts needs
more ranks than a TP and context group has, data-parallel replicas share experts: these are inner replicas of one
pipeline of the plan, with the micro-batches of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_megatron.plan.canonical import ExpertGroup, ExpertMember
from hetero_megatron.plan.fields import flag_error
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.plan.importers.megatron_parallel import MegatronParallel
    from hetero_megatron.spec import ModelSpec

_SIZE, _TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"


@dataclass(frozen=True)
class ExpertFlags:
    """``size``: ranks that divide the experts; ``tensor``: ranks that share the columns of each; ``replicas``:
    data-parallel replicas that share experts; ``num_experts``: 0 for a dense model."""

    size: int
    tensor: int
    replicas: int
    num_experts: int

    def groups(self, ranks: Sequence[int]) -> tuple[ExpertGroup, ...]:
        """Of a stage with these ranks, TP fastest, then context, then data parallel."""
        if not self.num_experts:
            return ()
        share, wide = self.num_experts // self.size, self.tensor
        found = []
        for start in range(0, len(ranks), self.size * wide):
            members = [
                ExpertMember(tuple(ranks[start + i * wide :][:wide]), (i * share, (i + 1) * share), (1,) * wide)
                for i in range(self.size)
            ]
            found.append(ExpertGroup(tuple(members)))
        return tuple(sorted(found, key=lambda group: min(group.ranks)))


def expert_flags(flags: MegatronParallel, spec: ModelSpec, data_parallel: int) -> ExpertFlags:
    """Check the flags against the model and the other sizes.

    Raises:
        UserError: names the flag.
    """
    size, asked = flags.expert_model_parallel_size, flags.expert_tensor_parallel_size
    if spec.moe is None:
        for key, value in ((_SIZE, size if size != 1 else None), (_TENSOR, asked)):
            if value is not None:
                raise flag_error(key, value, "the model has no mixture of experts", "leave the flag out")
        return ExpertFlags(1, 1, 1, 0)
    tensor = flags.tensor_model_parallel_size if asked is None else asked
    if tensor < 1:
        raise flag_error(_TENSOR, tensor, "too small", "an integer >= 1")
    count = spec.moe.num_experts
    if count % size:
        divisors = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
        why = f"{plural(count, 'expert')} cannot be divided evenly by it"
        raise flag_error(_SIZE, size, why, f"{divisors}, or a plan file with unequal counts")
    whole, inner = size * tensor, flags.tensor_model_parallel_size * flags.context_parallel_size
    replicas, rest = divmod(whole, inner)
    if whole < inner:
        replicas, rest = 1, inner % whole
    why = f"{size} x {tensor} ranks (expert x expert tensor parallel)"
    if rest:
        problem = f"{why} do not fit {inner} (tensor x context parallel)"
        raise flag_error(_SIZE, size, problem, "sizes whose product divides it, or is a multiple")
    if data_parallel % replicas:
        ranks = data_parallel * inner
        raise flag_error(_SIZE, size, f"{why} do not divide the {ranks} ranks of a pipeline stage", "a divisor")
    if replicas > 1 and flags.use_tp_pp_dp_mapping and flags.pipeline_model_parallel_size > 1:
        problem = "the replicas that share experts would be apart, as in Megatron, which refuses it too"
        raise flag_error("use_tp_pp_dp_mapping", True, problem, "leave the flag out")
    return ExpertFlags(size, tensor, replicas, count)
