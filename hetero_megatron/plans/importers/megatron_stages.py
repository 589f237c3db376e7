"""Megatron's flags about layers -> the layers of every stage and virtual stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut
from hetero_megatron.plans.canonical import ExpertGroup, ExpertMember, Interval, KeyValues, Unit
from hetero_megatron.plans.fields import flag_error
from hetero_megatron.plans.shares import nested_zigzag
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec

@dataclass(frozen=True)
class MegatronParallel:
    """Megatron's parallel flags, named like them; ``world_size`` is the number of ranks that were started."""

    world_size: int
    seq_length: int
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    cp_comm_type: Sequence[str] = ("p2p",)
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None  # as tensor parallel
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_activations: bool = False
    recompute_modules: Sequence[str] | None = None
    fine_grained_activation_offloading: bool = False
    offload_modules: Sequence[str] | None = None
    fine_grained_offloading_max_inflight_offloads: int | None = None
    cpu_offloading_num_layers: int | None = None
    cpu_offloading: bool = False
    use_tp_pp_dp_mapping: bool = False
    use_torch_fsdp2: bool = False
    torch_fsdp2_no_reshard_after_forward: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str | None = None  # of --use-megatron-fsdp
    schedule: str | None = None  # interleaved where there are virtual stages, else 1f1b

    @property
    def gather_weights(self) -> str | None:
        """For how long weights are whole that replicas divide, as a plan's ``weights`` has it; None: each has them all.
        Gradients alone (``optim_grads``) are those of weights that are gathered once a step."""
        if self.use_torch_fsdp2:
            return "layer"
        strategies = {"optim_grads": "step", "optim_grads_params": "layer"}
        return strategies.get(self.data_parallel_sharding_strategy or "") if self.use_megatron_fsdp else None


Ranges = tuple[Interval, ...]
MAX_LAYOUT = 1 << 16
VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def stage_layers(flags: MegatronParallel, num_layers: int) -> tuple[list[Ranges], int, int]:
    """Layer ranges of each stage, one per virtual stage; and the stages that hold embedding and head.

    Virtual stages go round: stage 0 has the first block of layers, stage 1 the second, and stage 0 again the block
    after that of the last stage.
    """
    pp = flags.pipeline_model_parallel_size
    if flags.pipeline_model_parallel_layout is not None:
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "num_layers_per_virtual_pipeline_stage",
        ):
            if getattr(flags, name):
                raise flag_error(
                    name, getattr(flags, name), "it contradicts --pipeline-model-parallel-layout"
                )
        counts, embed, head = layout_stages(flags.pipeline_model_parallel_layout, pp, num_layers)
        virtual = flags.num_virtual_stages_per_pipeline_rank
        if virtual not in (None, len(counts) // pp):
            problem = f"--pipeline-model-parallel-layout has {plural(len(counts) // pp, 'virtual stage')} per rank"
            raise flag_error("num_virtual_stages_per_pipeline_rank", virtual, problem, "the same, or leave it out")
        embed, head = embed % pp, head % pp
    else:
        counts, embed, head = virtual_counts(flags, num_layers), 0, pp - 1
    blocks = intervals(counts)
    return [tuple(blocks[p::pp]) for p in range(pp)], embed, head


def virtual_counts(flags: MegatronParallel, num_layers: int) -> list[int]:
    """Decoder layers of every virtual stage in the order of the model; those of one stage are equal but where embedding
    or loss count as a layer."""
    pp = flags.pipeline_model_parallel_size
    per_stage, virtual = (getattr(flags, name) for name in VIRTUAL)
    if per_stage is None and virtual in (None, 1):
        return layer_counts(flags, num_layers)
    name = VIRTUAL[0] if per_stage is not None else VIRTUAL[1]
    value = per_stage if per_stage is not None else virtual
    if per_stage is not None and virtual is not None:
        raise flag_error(name, value, f"it contradicts --{VIRTUAL[1].replace('_', '-')}", "one of the two")
    if value < 1 or pp == 1:
        problem = "virtual stages need several pipeline stages" if pp == 1 else "too small"
        raise flag_error(name, value, problem, "leave the flag out" if pp == 1 else "an integer >= 1")
    embed, loss = flags.account_for_embedding_in_pipeline_split, flags.account_for_loss_in_pipeline_split
    if embed or loss:
        slots = [(num_layers + embed + loss) // pp] * pp if (num_layers + embed + loss) % pp == 0 else []
    else:
        slots = layer_counts(flags, num_layers)
    rounds = virtual
    if per_stage is not None:
        divisible = len(set(slots)) == 1 and slots[0] % value == 0
        rounds = slots[0] // value if divisible else 0
    if not slots or rounds < 1 or any(count % rounds for count in slots):
        described = f"{plural(num_layers, 'layer')} over {plural(pp, 'stage')}"
        raise flag_error(name, value, f"{described} cannot be divided into such virtual stages", "what divides them")
    counts = [count // rounds for count in slots] * rounds
    counts[0] -= embed
    counts[-1] -= loss
    return counts


def intervals(counts: Sequence[int]) -> list[Interval]:
    """Consecutive ranges of these lengths."""
    ranges, start = [], 0
    for count in counts:
        ranges.append((start, start + count))
        start += count
    return ranges


def layer_counts(flags: MegatronParallel, num_layers: int) -> list[int]:
    """Decoder layers per stage; what does not divide goes to the first stages (30 over 4: 8, 8, 7, 7)."""
    pp = flags.pipeline_model_parallel_size
    first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
    embed, loss = flags.account_for_embedding_in_pipeline_split, flags.account_for_loss_in_pipeline_split
    if first is None and last is None:
        slots = _even(num_layers + embed + loss, pp)
        slots[0] -= embed
        slots[-1] -= loss
        if min(slots) < 0:
            raise flag_error(
                "pipeline_model_parallel_size", pp, f"more stages than {plural(num_layers, 'layer')} can fill"
            )
        return slots
    if embed or loss:
        name = "account_for_embedding_in_pipeline_split" if embed else "account_for_loss_in_pipeline_split"
        raise flag_error(
            name, True, "it contradicts --decoder-first/last-pipeline-num-layers", "one of the two"
        )
    fixed = [n for n in (first, last) if n is not None]
    name = "decoder_first_pipeline_num_layers" if first is not None else "decoder_last_pipeline_num_layers"
    rest, stages = num_layers - sum(fixed), pp - len(fixed)
    if min(fixed) < 0 or rest < 0 or stages < 0 or (stages == 0 and rest):
        raise flag_error(
            name,
            fixed[0],
            f"it leaves {rest} of {plural(num_layers, 'layer')} for {max(stages, 0)} of {plural(pp, 'pipeline stage')}",
            f"first, last and the stages between them adding up to {plural(num_layers, 'layer')}",
        )
    middle = _even(rest, stages) if stages else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def _even(total: int, parts: int) -> list[int]:
    quotient, remainder = divmod(total, parts)
    return [quotient + (i < remainder) for i in range(parts)]


def layout_stages(text: str, pp: int, num_layers: int) -> tuple[list[int], int, int]:
    """Megatron's layout language, e.g. ``Et*3|(tt|)*29,m|L``: layers of every virtual stage, and which of them hold
    embedding and head."""
    name = "pipeline_model_parallel_layout"
    stages = expand_layout(text).split("|")
    symbols = "".join(stages)
    if "m" in symbols:
        problem = "modules that predict further tokens ('m') are always with 'L', and not written"
        raise flag_error(name, text, problem, "E, t, L and |, and --mtp-num-layers")
    if len(stages) % pp or (pp == 1 and len(stages) > 1):
        problem = f"it has {plural(len(stages), 'stage')} for {plural(pp, 'pipeline-parallel rank')}"
        raise flag_error(name, text, problem, plural(pp, "stage") + (", or a multiple" if pp > 1 else ""))
    if symbols.count("E") != 1 or not symbols.startswith("E"):
        raise flag_error(name, text, "the embedding 'E' stands once, before everything else", "E…")
    if symbols.count("L") != 1 or not symbols.endswith("L"):
        raise flag_error(name, text, "the loss 'L' stands once, after everything else", "…L")
    counts = [stage.count("t") for stage in stages]
    if sum(counts) != num_layers:
        raise flag_error(
            name, text, f"it has {plural(sum(counts), 'decoder layer')}, the model has {num_layers}", str(num_layers)
        )
    embed = next(i for i, stage in enumerate(stages) if "E" in stage)
    head = next(i for i, stage in enumerate(stages) if "L" in stage)
    return counts, embed, head


def expand_layout(text: str) -> str:
    """Multiply out ``x*n`` and ``(...)*n``; commas and blanks are cosmetic."""
    tokens = re.findall(r"\d+|.", re.sub(r"[\s,]", "", text), flags=re.DOTALL)
    expanded, end = _sequence(text, tokens, 0)
    if end < len(tokens):
        raise flag_error("pipeline_model_parallel_layout", text, "a ')' without '('")
    return expanded


def _sequence(text: str, tokens: list[str], i: int, depth: int = 0) -> tuple[str, int]:
    """Expand tokens from ``i`` to the end of this parenthesis; (expanded, next index)."""
    name = "pipeline_model_parallel_layout"
    pieces: list[str] = []
    while i < len(tokens) and tokens[i] != ")":
        if tokens[i] == "(":
            if depth > 20:
                raise flag_error(name, text, "nested too deeply")
            piece, i = _sequence(text, tokens, i + 1, depth + 1)
            if i == len(tokens):
                raise flag_error(name, text, "a '(' without ')'")
        elif tokens[i] in "EtmL|":
            piece = tokens[i]
        else:
            raise flag_error(name, text, f"unexpected {tokens[i]!r}", "E, t, m, L, |, x*n and (...)*n")
        i += 1
        if i < len(tokens) and tokens[i] == "*":
            if i + 1 == len(tokens) or not tokens[i + 1].isdecimal():
                raise flag_error(name, text, "a '*' without a number after it", "x*n")
            if len(piece) * int(tokens[i + 1]) > MAX_LAYOUT:
                raise flag_error(name, text, "it expands to an absurd length")
            piece *= int(tokens[i + 1])
            i += 2
        pieces.append(piece)
    return "".join(pieces), i


COMM_TYPES = ("p2p", "a2a", "a2a+p2p", "allgather")


@dataclass(frozen=True)
class ContextFlags:
    """``sizes``: (heads divided by, groups that exchange keys and values)."""

    sizes: tuple[int, int]
    gather: bool = False

    @property
    def size(self) -> int:
        return self.sizes[0] * self.sizes[1]


def context_flags(size: int, comm_type: Sequence[str] | str, hierarchical: Sequence[int] | None) -> ContextFlags:
    """Check the flags against each other.

    Raises:
        UserError: an unknown or mixed --cp-comm-type, or sizes that are missing, not asked for or not those of
            the whole.
    """

    def error(flag: str, value: object, problem: str, accepted: str) -> UserError:
        return UserError(problem, field="--" + flag, value=value, accepted=accepted, where="command line")

    types = (comm_type,) if isinstance(comm_type, str) else tuple(comm_type)
    for kind in types:
        if kind not in COMM_TYPES:
            raise error("cp-comm-type", kind, "unknown", ", ".join(COMM_TYPES))
    if len(set(types)) > 1:
        raise error("cp-comm-type", " ".join(types), "this version has one type for all layers", "one of them")
    kind, flag = types[0], "hierarchical-context-parallel-sizes"
    if kind != "a2a+p2p" or size == 1:
        if hierarchical is not None and size > 1:
            raise error(flag, list(hierarchical), f"--cp-comm-type {kind} has no hierarchy", "--cp-comm-type a2a+p2p")
        return ContextFlags({"a2a": (size, 1)}.get(kind, (1, size)), kind == "allgather")
    if hierarchical is None:
        raise error(flag, None, "--cp-comm-type a2a+p2p needs it", f"two sizes whose product is {size}")
    if len(hierarchical) != 2 or min(hierarchical) < 1 or hierarchical[0] * hierarchical[1] != size:
        accepted = f"two sizes whose product is {size} (--context-parallel-size)"
        raise error(flag, list(hierarchical), "not the sizes of the two levels", accepted)
    return ContextFlags((hierarchical[0], hierarchical[1]))


def context_members(
    flags: ContextFlags, ranks: Sequence[tuple[int, ...]], micro_batch_size: int, seq_length: int, num_heads: int
) -> tuple[tuple[Unit, ...], KeyValues | None]:
    """Units of one stage from its TP groups, in the order of their context rank."""
    members, groups = flags.sizes
    counts = [b - a for a, b in cut(seq_length, [1] * flags.size)]
    tokens = nested_zigzag([counts[g * members : (g + 1) * members] for g in range(groups)])
    heads = cut(num_heads, [1] * members)
    units = [
        Unit(tp, (1,) * len(tp), (0, micro_batch_size), tokens[i // members][i % members], heads[i % members],
             i // members)
        for i, tp in enumerate(ranks)
    ]  # fmt: skip
    return tuple(units), KeyValues("gather") if flags.gather and flags.size > 1 else None


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
        share, tensor_size = self.num_experts // self.size, self.tensor
        expert_groups = []
        for start in range(0, len(ranks), self.size * tensor_size):
            members = [
                ExpertMember(
                    tuple(ranks[start + i * tensor_size :][:tensor_size]),
                    (i * share, (i + 1) * share),
                    (1,) * tensor_size,
                )
                for i in range(self.size)
            ]
            expert_groups.append(ExpertGroup(tuple(members)))
        return tuple(sorted(expert_groups, key=lambda group: min(group.ranks)))


def expert_flags(flags: MegatronParallel, spec: ModelSpec, data_parallel: int) -> ExpertFlags:
    """Check the flags against the model and the other sizes.

    Raises:
        UserError: names the flag.
    """
    size, expert_tensor = flags.expert_model_parallel_size, flags.expert_tensor_parallel_size
    if spec.moe is None:
        for key, value in ((_SIZE, size if size != 1 else None), (_TENSOR, expert_tensor)):
            if value is not None:
                raise flag_error(key, value, "the model has no mixture of experts", "leave the flag out")
        return ExpertFlags(1, 1, 1, 0)
    tensor = flags.tensor_model_parallel_size if expert_tensor is None else expert_tensor
    if tensor < 1:
        raise flag_error(_TENSOR, tensor, "too small", "an integer >= 1")
    count = spec.moe.num_experts
    if count % size:
        divisors = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
        why = f"{plural(count, 'expert')} cannot be divided evenly by it"
        raise flag_error(_SIZE, size, why, f"{divisors}, or a plan file with unequal counts")
    expert_ranks, inner = size * tensor, flags.tensor_model_parallel_size * flags.context_parallel_size
    replicas, remainder = divmod(expert_ranks, inner)
    if expert_ranks < inner:
        replicas, remainder = 1, inner % expert_ranks
    why = f"{size} x {tensor} ranks (expert x expert tensor parallel)"
    if remainder:
        problem = f"{why} do not fit {inner} (tensor x context parallel)"
        raise flag_error(_SIZE, size, problem, "sizes whose product divides it, or is a multiple")
    if data_parallel % replicas:
        ranks = data_parallel * inner
        raise flag_error(_SIZE, size, f"{why} do not divide the {ranks} ranks of a pipeline stage", "a divisor")
    if replicas > 1 and flags.use_tp_pp_dp_mapping and flags.pipeline_model_parallel_size > 1:
        problem = "the replicas that share experts would be apart, as in Megatron, which refuses it too"
        raise flag_error("use_tp_pp_dp_mapping", True, problem, "leave the flag out")
    return ExpertFlags(size, tensor, replicas, count)
