"""Estimate of when gradients of a plan template are reduced and parameters gathered: the events of
:mod:`~hetero_megatron.predictor.simulate.grad_sync` with one rank for each stage, whose ranks are alike."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hetero_megatron.planner.estimate.sync_segments import BucketRun, LastBackward, SyncLoads, SyncSegment
from hetero_megatron.planner.template.plan_template import StageId
from hetero_megatron.plans.buckets import IN_FLIGHT
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.link_model import HostRates, RankHost, exchange_host_seconds


def sync_ends(
    loads: SyncLoads,
    costs: CostModel,
    chips: Mapping[StageId, str],
    idle: Mapping[StageId, float],
    item: float,
    times: Mapping[StageId, LastBackward] | None = None,
) -> dict[StageId, float]:
    """When each stage's ranks are done with all segments, in seconds from the start of the step. Follows
    ``simulate.grad_sync``, except that where a segment has many buckets these are one event: a stage's segments go in
    order, and ports serve first what is ready first.

    Args:
        chips: chip type by stage.
        idle: when each stage's ranks are done with everything else.
        item: bytes per element.
        times: the last backwards for gradient reduction; None: all-gather of updated parameters.
    """
    run = _SyncRun(costs, chips, idle, item, times)
    events = [(segment, bucket) for segment in loads.segments for bucket in segment.runs]
    if times is None:
        events.reverse()
    queues: dict[StageId, list[int]] = defaultdict(list)  # events of each stage that did not start, last one first
    for number in range(len(events) - 1, -1, -1):
        for stage_id in events[number][0].held:
            queues[stage_id].append(number)
    heap: list[tuple[float, int, list[tuple[float, float]], dict[StageId, float]]] = []

    def launch(candidates: Iterable[int]) -> None:
        for number in candidates:
            segment, bucket = events[number]
            if all(queues[stage_id][-1] == number for stage_id in segment.held):
                releases, afters = run.releases(segment, bucket)
                heapq.heappush(heap, (run.ready(segment, bucket, releases), number, releases, afters))

    launch(dict.fromkeys(queue[-1] for queue in queues.values()))
    while heap:
        _, number, releases, afters = heapq.heappop(heap)
        segment, bucket = events[number]
        run.travel(segment, bucket, releases, afters)
        launch(
            dict.fromkeys(
                queues[stage_id][-1]
                for stage_id in segment.held
                if queues[stage_id].pop() == number and queues[stage_id]
            )
        )
    return {stage_id: host.finish(idle[stage_id]) for stage_id, host in run.hosts.items()}


class _SyncRun:
    """State of :func:`sync_ends`. Releases: (fraction of what travels, when it and what comes before it is packed, in
    seconds), in the order of time."""

    def __init__(
        self,
        costs: CostModel,
        chips: Mapping[StageId, str],
        idle: Mapping[StageId, float],
        item: float,
        times: Mapping[StageId, LastBackward] | None,
    ) -> None:
        self.costs, self.idle, self.item, self.times = costs, idle, item, times
        self.hosts = {stage_id: RankHost() for stage_id in idle}
        self.rates = {stage_id: costs.chip_rates(chip).host for stage_id, chip in chips.items()}
        self.free: dict[object, float] = {}  # when ports, and stages, are free for the next event (s)

    def host_seconds(self, segment: SyncSegment, bucket: BucketRun, at: StageId) -> tuple[float, float]:
        """(before, after) that it travels, on a rank's host."""
        if not self.costs.options.sharded:
            return 0.0, 0.0
        pack, add, unpack, exchange = self.rates[at]
        held_elements = segment.held[at] * bucket.fraction
        owned_elements = held_elements * segment.share[at]
        return exchange_host_seconds(
            HostRates(pack, add, unpack, exchange * bucket.count), held_elements - owned_elements,
            owned_elements * (segment.copies - 1), owned_elements,
            segment.copies == 1, segment.ranks == segment.copies, segment.ranks, self.item, self.times is None,
        )  # fmt: skip

    def releases(
        self, segment: SyncSegment, bucket: BucketRun
    ) -> tuple[list[tuple[float, float]], dict[StageId, float]]:
        """(releases of what starts, by stage the host's seconds after it has travelled)."""
        share = 1 / bucket.count
        completions: Sequence[tuple[float, Mapping[StageId, float]]] = [(1.0, self.idle)]
        if self.times is not None and self.costs.options.overlap:
            single = bucket.count == 1
            completions = [(1.0, segment.complete(bucket, self.times))] if single else segment.releases(self.times)
        packed, afters = [0.0] * len(completions), dict[StageId, float]()
        for stage_id in segment.held:
            pack, sum_seconds = self.host_seconds(segment, bucket, stage_id)
            afters[stage_id], last = sum_seconds, completions[-1][1][stage_id]
            late = self.hosts[stage_id].send(last, pack) - last
            for i, (incomplete, when) in enumerate(completions):
                # Before it packs more, it has summed all that was complete before but what is under way.
                summed = sum_seconds * max(0.0, 1 - incomplete - share)
                packed[i] = max(packed[i], when[stage_id] + late + summed - pack * max(0.0, incomplete - share))
        return [(incomplete, seconds) for (incomplete, _), seconds in zip(completions, packed)], afters

    def ready(self, segment: SyncSegment, bucket: BucketRun, releases: list[tuple[float, float]]) -> float:
        """When its ranks can send the first bucket (s)."""
        return max(releases[0][1], *(self.free.get(stage_id, 0.0) for stage_id in segment.held))

    def travel(
        self,
        segment: SyncSegment,
        bucket: BucketRun,
        releases: list[tuple[float, float]],
        afters: Mapping[StageId, float],
    ) -> None:
        item, share, free = self.item * bucket.fraction, 1 / bucket.count, self.free
        begin = max([self.ready(segment, bucket, releases), *(free.get(port, 0.0) for port in segment.ports)])

        def end_of(seconds: float) -> float:
            """When something is done that takes so many seconds per byte of an element."""
            return max(begin + seconds * item, *(when + seconds * item * incomplete for incomplete, when in releases))

        end = end_of(segment.link)
        for port, seconds in segment.ports.items():
            free[port] = end_of(seconds)
            end = max(end, free[port])
        end += segment.latency
        if bucket.count == 1:
            for stage_id, sum_seconds in afters.items():
                self.hosts[stage_id].under_way.append((end, sum_seconds))
            return
        # At most IN_FLIGHT buckets travel at once, so the latency and the host's time are paid once per IN_FLIGHT ones.
        bucket_seconds, rows = max(segment.link, *segment.ports.values(), 0.0) * item, -(-bucket.count // IN_FLIGHT)
        slowest = max(afters.values()) * share
        end = max(end, begin + rows * (segment.latency + bucket_seconds * share + slowest) - slowest)
        # A rank sends its next segment's first bucket when all but this one's last are done.
        free |= dict.fromkeys(segment.held, end - bucket_seconds * segment.trailing)
        last = segment.last_bucket
        for stage_id, sum_seconds in afters.items():
            self.hosts[stage_id].under_way.append((end, sum_seconds * last))
            self.hosts[stage_id].delay += sum_seconds * (1 - last)
