"""An independent judge of plans in Sailor's format, by the rules of Sailor's simulator (SOSP'25, MIT).

Written from the description of those rules (and a reading of the published simulator for the facts:
which bandwidth row, which sizes, which bucket); it shares no line with it and none with our planner, and reads nothing
but Sailor's published inputs. The rules, whether or not they are good ones:

* a stage's compute is the sum of its layers' profiled forward and backward seconds, of its slowest replica;
* sending: a whole activation (of one TP rank's output, undivided) per micro-batch, over the row of the network table
  for the TP degrees at both ends, never inside a node; an inner stage sends forward and backward, the last twice
  backward, the first once forward (twice when there are more than three stages);
* a step is (m - 1) x the slowest stage (compute + sending), plus all compute, plus all sending, plus the slowest
  update (of a stage's *first* layer), plus synchronisation;
* synchronisation: a ring all-reduce in fp32 of the stage's parameters over the smallest TP degree of its replicas (4 at
  most), in buckets of 500 MB, over the slowest link between consecutive replicas, stages at the same time;
* bandwidth is a polynomial of log2(megabytes), not bounded by the table's maximum;
* memory: 24 bytes per parameter, activations x (stages - index), 5.06 GB for the framework.

Traps that are not copied: a profile entry that is missing is an error here (Sailor's judge takes it as 0 seconds), and
so are stages with unlike numbers of replicas.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

FRAMEWORK_BYTES = 5.06e9
BYTES_PER_PARAMETER = 24  # fp32: weights, gradients, two moments, communication and DeepSpeed's copy
BUCKET_BYTES = 500_000_000
FLOAT = 4


class CannotJudge(Exception):
    """The plan uses what the published inputs say nothing about."""


@dataclass(frozen=True)
class Verdict:
    """Seconds of a step and its parts; ``memory``: by stage, bytes of the worst replica; ``over``: by which the worst
    stage exceeds its GPU (0: fits)."""

    seconds: float
    compute: tuple[float, ...]
    sending: tuple[float, ...]
    sync: float
    memory: tuple[float, ...]
    over: float
    used: dict[str, int]

    @property
    def per_second(self) -> float:
        return 1 / self.seconds


@dataclass(frozen=True)
class Replica:
    """One data-parallel member of a stage."""

    gpu: str
    tp: int
    zone: str


class Judge:
    """Scores plans of one model.

    Args:
        folder: with Sailor's files; model: its name in them; zone: where GPUs without a zone are.
    """

    def __init__(self, folder: Path, model: str = "OPT-350", zone: str = "us-central1-a") -> None:
        read = {n: json.loads((folder / f"{n}.json").read_text()) for n in (
            "profiles", "llm_info", "basic_cluster_config", "multizone_bandwidths_het",
        )}  # fmt: skip
        self.profile: dict[str, Any] = read["profiles"][model]
        self.info: dict[str, Any] = read["llm_info"][model]
        self.gpus: dict[str, Any] = read["basic_cluster_config"]
        self.network: dict[str, Any] = read["multizone_bandwidths_het"]
        self.zone = zone
        self.layers = len(self.info["1"])

    def score(self, plan: dict[str, Any], batch: int | None = None) -> Verdict:
        """Score a plan dictionary; ``batch``: sequences per step where the plan does not say.

        Raises:
            CannotJudge: a profile or bandwidth that is missing, layers left out, unlike numbers of replicas.
        """
        if len(plan["pipeline_list"]) != 1:
            raise CannotJudge("one list of stages is expected")
        (pipeline,) = plan["pipeline_list"]
        layers: list[list[int]] = pipeline["layers_per_stage"]
        if [i for stage in layers for i in stage] != list(range(self.layers)):
            raise CannotJudge("the stages do not have all layers in order")
        stages = [[self._replica(r) for r in stage] for stage in pipeline["tmp_per_stage"]]
        if {len(s) for s in stages} != set(pipeline["dp"]) or len(set(pipeline["dp"])) != 1:
            raise CannotJudge("all stages have one number of replicas")
        size = plan["mbs"]
        micro_batches = math.ceil((plan.get("gbs") or batch) / (size * len(stages[0])))
        compute = [max(self.compute(r.gpu, r.tp, size, ids) for r in s) for s, ids in zip(stages, layers, strict=True)]
        sending = self.sending(stages, layers, size)
        update = max(
            max(self.entry(r.gpu, r.tp, size, ids[0])[2] for r in s) for s, ids in zip(stages, layers, strict=True)
        )
        slowest = max(a + b for a, b in zip(compute, sending, strict=True))
        sync = max(self.sync(s, ids) for s, ids in zip(stages, layers, strict=True))
        seconds = (micro_batches - 1) * slowest + sum(compute) + sum(sending) + update + sync
        memory, over = [], 0.0
        for index, (stage, ids) in enumerate(zip(stages, layers, strict=True)):
            needs = [self.memory(r.tp, ids, size, len(layers) - index) for r in stage]
            memory.append(max(needs))
            over = max(over, *(n - self.gpus[r.gpu]["mem_per_gpu"] for n, r in zip(needs, stage, strict=True)))
        used: dict[str, int] = {}
        for replica in (r for s in stages for r in s):
            used[replica.gpu] = used.get(replica.gpu, 0) + replica.tp
        return Verdict(seconds, tuple(compute), tuple(sending), sync, tuple(memory), over, used)

    def _replica(self, given: list[Any]) -> Replica:
        (machines, tp) = given
        if len(machines) != 1:
            raise CannotJudge("a replica lies in one machine")
        gpu, _, zone = machines[0]
        return Replica(gpu, tp, zone)

    def entry(self, gpu: str, tp: int, size: int, layer: int) -> tuple[float, float, float]:
        """(forward, backward, update) seconds of a layer."""
        found = self.profile.get(gpu, {}).get(str(size), {}).get(str(tp))
        if not found:
            raise CannotJudge(f"no profile of {gpu} with micro-batch {size} and TP {tp}")
        forward, backward, update = found[str(layer)]
        return forward, backward, update

    def compute(self, gpu: str, tp: int, size: int, layers: list[int]) -> float:
        return sum(sum(self.entry(gpu, tp, size, layer)[:2]) for layer in layers)

    def sending(self, stages: list[list[Replica]], layers: list[list[int]], size: int) -> list[float]:
        """Seconds per micro-batch that each stage sends."""
        last = len(stages) - 1
        out = []
        for i, ids in enumerate(layers):
            ahead = self._send(stages[i], stages[i + 1], ids[-1], size) if i < last else 0.0
            back = self._send(stages[i], stages[i - 1], ids[0], size) if i > 0 else 0.0
            if i == last:
                out.append(2 * back)
            elif i == 0:
                out.append(ahead * (1 if len(stages) <= 3 else 2))
            else:
                out.append(ahead + back)
        return out

    def _send(self, source: list[Replica], target: list[Replica], layer: int, size: int) -> float:
        data = self.info["1"][str(layer)]["act_output_floats"] * FLOAT * size
        return max(self.seconds(data, a, b, a.tp, b.tp) for a, b in set(zip(source, target, strict=True)))

    def seconds(self, data: float, a: Replica, b: Replica, wide_a: int, wide_b: int) -> float:
        """A message of ``data`` bytes between machines, by the row of the table for so many GPUs at both ends."""
        counts = [min(n, self.gpus[r.gpu]["gpus_per_node"]) for n, r in ((wide_a, a), (wide_b, b))]
        try:
            found = self.network[a.zone][a.gpu][str(counts[0])][b.zone][b.gpu][str(counts[1])][0]
        except KeyError as error:
            raise CannotJudge(f"no bandwidth between {a} and {b}: {error}") from None
        return _message_seconds(data, tuple(found))

    def sync(self, replicas: list[Replica], layers: list[int]) -> float:
        """Ring all-reduce of a stage's gradients."""
        count = len(replicas)
        if count == 1:
            return 0.0
        size = sum(self.info["1"][str(i)]["params_floats"] for i in layers) * FLOAT / min(4, *(r.tp for r in replicas))
        worst = 0.0
        for a, b in set(zip(replicas, replicas[1:])):
            left, total = size, 0.0
            while left > 0:
                bucket = min(left, BUCKET_BYTES)
                total += 2 * (count - 1) * self.seconds(bucket / count, a, b, 1, 1)
                left -= bucket
            worst = max(worst, total)
        return worst

    def memory(self, tp: int, layers: list[int], size: int, in_flight: int) -> float:
        """Bytes of one GPU."""
        info = self.info[str(tp)]
        parameters = sum(info[str(i)]["params_floats"] for i in layers)
        kept = sum(info[str(i)]["act_mem_floats"] for i in layers) * FLOAT * size
        return FRAMEWORK_BYTES + BYTES_PER_PARAMETER * parameters + kept * in_flight


@lru_cache(maxsize=65536)
def _message_seconds(data: float, coefficients: tuple[float, ...]) -> float:
    """Gigabytes over a polynomial (highest power first) of log2(megabytes), which is GB/s."""
    x = math.log2(data / 1e6)
    rate = 0.0
    for coefficient in coefficients:
        rate = rate * x + coefficient
    return data / 1e9 / rate


def spelled(layers: list[int], replicas: list[tuple[str, int]], copies: int, size: int, batch: int) -> dict[str, Any]:
    """A plan dictionary of ``copies`` equal pipelines; ``layers``: numbers with embedding and head as layers of their
    own; ``replicas``: (GPU, TP) of each stage."""
    rows, start = [], 0
    for count in layers:
        rows.append(list(range(start, start + count)))
        start += count
    stages = [[[[[gpu, tp, "us-central1-a"]], tp]] * copies for gpu, tp in replicas]
    pipeline = {"num_stages": len(rows), "layers_per_stage": rows, "tmp_per_stage": stages, "dp": [copies] * len(rows)}
    return {"pipeline_list": [pipeline], "mbs": size, "gbs": batch}
