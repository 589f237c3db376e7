"""How routed tokens travel where a group of experts lies in several islands of a plan.

Straight, a token goes to every rank that has some of its experts, so several times over the slow link to an island
where several ranks have some. In two hops it goes once to each such island, to one rank of it (its *relay* for the
sender), which sends it on inside the island. The sums come back the same way: added in an island first, then over
islands. Sender and receiver know the way from the plan alone. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hetero_megatron.plan.canonical import ExpertGroup, Stage
from hetero_megatron.plan.experts import Islands, destinations, split_by_island

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec
    from hetero_megatron.spec.moe import MoE

WORTH_A_HOP = 1 / 16  # of what crosses between islands must be saved by a second hop, or its messages are not worth it


@dataclass(frozen=True)
class TokenHops:
    """The two hops of one group.

    Attributes:
        islands: the group's ranks by island, ascending in each.
    """

    islands: Islands

    def island(self, rank: int) -> tuple[int, ...]:
        """The island of a rank of the group."""
        return next(ranks for ranks in self.islands if rank in ranks)

    def relay(self, sender: int, island: tuple[int, ...]) -> int:
        """The rank of ``island`` to which ``sender`` sends tokens for it: itself in its own; in another one, the ranks
        of which take turns over the senders outside, so that equal nodes exchange between ranks of equal number."""
        if sender in island:
            return sender
        outside = sorted(rank for ranks in self.islands if ranks != island for rank in ranks)
        return island[outside.index(sender) % len(island)]

    def relays(self, sender: int) -> dict[int, tuple[int, ...]]:
        """Relay -> its island, for every island of the group."""
        return {self.relay(sender, island): island for island in self.islands}


def token_hops(moe: MoE, group: ExpertGroup, islands: Islands) -> TokenHops | None:
    """Two hops where they save at least 1/16 of the tokens that are expected between the islands with even routing;
    None: straight."""
    return _token_hops(group, islands, moe.num_experts, moe.top_k)


@lru_cache(maxsize=4096)
def _token_hops(group: ExpertGroup, islands: Islands, num_experts: int, top_k: int) -> TokenHops | None:
    mine = split_by_island(islands, group.ranks)
    if not islands or len(mine) == 1 or len(mine) == len(group.ranks):
        return None
    straight = once = 0.0
    even = (1 / num_experts,) * num_experts
    for source in group.ranks:
        to = destinations(group, source, num_experts, islands)
        for island in (island for island in mine if source not in island):
            per_rank = shares_of(even, to, island)
            straight += sum(hit_probability(share, num_experts, top_k) for share in per_rank.values())
            once += hit_probability(share_of_island(even, to, island), num_experts, top_k)
    return TokenHops(mine) if once < (1 - WORTH_A_HOP) * straight else None


def stage_token_hops(spec: ModelSpec, stage: Stage, islands: Islands) -> dict[ExpertGroup, TokenHops]:
    """Of the groups that the stage lists, those whose tokens go in two hops."""
    moe = spec.moe
    found = {group: token_hops(moe, group, islands) for group in stage.experts} if moe is not None else {}
    return {group: hops for group, hops in found.items() if hops is not None}


def routing_groups(spec: ModelSpec, stage: Stage, islands: Islands) -> list[tuple[int, ...]]:
    """Groups of several ranks that exchange routed tokens and are no TP group, ascending ranks in each; those of the
    second hop after the group of the first one, in the order in which they meet."""
    hops, found = stage_token_hops(spec, stage, islands), []
    for group in stage.experts:
        inner = hops[group].islands if group in hops else ()
        found += [ranks for ranks in (tuple(sorted(group.ranks)), *inner) if len(ranks) > 1]
    return found


def shares_of(
    popular: Sequence[float], to: Sequence[Iterable[int]], ranks: Iterable[int]
) -> Mapping[int, float]:
    """By rank of ``ranks``, the popularity of the experts for which tokens go ``to`` it; those without are left out."""
    found: dict[int, float] = defaultdict(float)
    among = set(ranks)
    for share, receivers in zip(popular, to, strict=True):
        for rank in among.intersection(receivers):
            found[rank] += share
    return found


def share_of_island(popular: Sequence[float], to: Sequence[Iterable[int]], island: Iterable[int]) -> float:
    """The popularity of the experts for which tokens go to some rank of an island."""
    among = set(island)
    return sum(share for share, receivers in zip(popular, to, strict=True) if among.intersection(receivers))


def hit_probability(share: float, experts: int, top_k: int) -> float:
    """That at least one of a token's ``top_k`` different experts is among some that get ``share`` of all routed tokens:
    as if they were ``share * experts`` equally popular ones."""
    miss = 1.0
    for i in range(top_k):
        miss *= max(0.0, 1.0 - share * experts / (experts - i)) if share < 1.0 else 0.0
    return 1.0 - miss
