"""Activations in host memory between forward and backward: the result of one process, in the same bits as where they
stay, less memory, and as much of either as the formulas say."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans import dump_yaml, plan_from_dict
from hetero_megatron.plans.canonical import ActivationOffload
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.spec import Lora, adapted, load_model
from tests.distributed.training.test_dry_run import config
from tests.distributed.training.test_fp8_parity import WIDE
from tests.distributed.training.test_lora import check as check_adapters
from tests.support.moe_models import MOE_FAMILIES
from tests.support.parity import Case, check_case, fixed_case, random_case, run_case
from tests.support.pool import Pool, shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

SEED, COUNT = int(os.environ.get("SEED", "51")), int(os.environ.get("N", "8"))
QUICK = range(2)  # in `make test`
SLOW = (3,)


def require_equal_bits(case: Case, other: Case, pool: Pool) -> None:
    """Of both, and the numbers of a single process."""
    (_, ranks), (_, theirs) = run_case(case, pool), check_case(other, pool)
    for mine, there in zip(ranks, theirs, strict=True):
        assert mine["losses"] == there["losses"] and mine["norms"] == there["norms"], other.describe()
        for kind in ("grads", "weights"):
            for (name, box, a), (_, at, b) in zip(mine[kind], there[kind], strict=True):
                assert box == at and np.array_equal(a, b), f"{kind} of {name}: {other.describe()}"


def offloading(case: Case) -> Case:
    """With activations of some layers of most stages in host memory."""
    rng, pipelines = random.Random(f"offload {case.seed}"), []
    for pipeline in case.plan["pipelines"]:
        stages = []
        for each in pipeline["stages"]:
            ranges = each["layers"] if not each["layers"] or isinstance(each["layers"][0], list) else [each["layers"]]
            count = sum(b - a for a, b in ranges)
            which: Any = rng.choice(["all", {"first": rng.randint(0, count)}])
            away = {"activations": {"offload": which, "ahead": rng.choice([1, 1, 2, 3])}}
            stages.append(each | (away if rng.random() < 0.8 else {}))
        pipelines.append(pipeline | {"stages": stages})
    # A stored schedule says for which stages it was made.
    return replace(case, plan=case.plan | {"pipelines": pipelines})


@pytest.mark.parametrize("index", quick(range(COUNT), QUICK, SLOW))
def test_random_plans_give_the_same_bits(index: int) -> None:
    case = random_case(SEED + index, "fp64" if index % 2 else "fp32", divided=index % 3 == 0)
    require_equal_bits(case, offloading(case), shared_pool())


@pytest.mark.usefixtures("extension")
@pytest.mark.timeout(1800)  # building takes minutes
@pytest.mark.parametrize("index", quick(range(4), [], [0]))
def test_random_plans_give_the_same_bits_on_late_devices(index: int) -> None:
    case = random_case(SEED + 100 + index, "fp32" if index % 2 else "fp64")
    require_equal_bits(case, offloading(case), shared_pool(("emulated:late=0.0003",) * 8))


RECOMPUTE: list[Any] = ["none", "selective", "elementwise", "full", {"first": 1}]
OFFLOAD: list[dict[str, Any]] = [{"offload": "all"}, {"offload": {"first": 2}}, {"offload": "all", "ahead": 2}]


@pytest.mark.parametrize("way", quick(range(10), [7], [4]))
def test_every_recompute_gives_the_same_bits(way: int) -> None:
    recompute, schedule = RECOMPUTE[way % 5], ("1f1b", "zero-bubble")[way // 5]

    def made(offload: dict[str, Any] | None) -> Case:
        away = {} if offload is None else {"activations": offload}
        first = stage([0, 1], [0, 2], tp=2, recompute=recompute, **away)
        last = stage([2], [2, 3], recompute=recompute, **({"activations": {"offload": "all"}} if away else {}))
        return fixed_case(LLAMA, plan([pipe(2, 4, first, last)], schedule=schedule))

    require_equal_bits(made(None), made(OFFLOAD[way % 3]), shared_pool())


def spelled(recompute: Any, offload: dict[str, Any] | None, schedule: str, context: bool = False) -> dict[str, Any]:
    more = {"recompute": recompute} | ({} if offload is None else {"activations": offload})
    split: dict[str, Any] = {"tp": 2}
    if context:
        groups = [{"ranks": [0], "tokens": [640], "heads": [8]}, {"ranks": [1], "tokens": [384], "heads": [8]}]
        split = {"context": groups}
    first, last = stage([0, 1], [0, 3], **split, **more), stage([2], [3, 6], **more)
    return plan([pipe(4, 4, first, last)], seq_length=1024, schedule=schedule)


def peaks(tmp_path: Path, *args: Any, ranks: tuple[int, ...] = (0, 2)) -> list[tuple[int, int, int, int]]:
    """By rank, (most bytes of a dry run, and of the formula; the same in host memory)."""
    run = config("fp32", tmp_path, spelled(*args))
    run = replace(run, spec=replace(run.spec, hidden_size=256, ffn_hidden_size=768))
    estimates, found = estimate_memory(run.plan, run.spec, run.dtype), []
    for rank in ranks:
        dry = run_rank(run, rank)
        found.append((dry.peak, estimates[rank].total, dry.activations, estimates[rank].host))
    return found


@pytest.mark.parametrize("way", quick(range(len(RECOMPUTE)), [], [3]))
def test_memory_of_device_and_host_is_the_formula(way: int, tmp_path: Path) -> None:
    """What offload saves of the peak is known to the byte, but for two numbers of each token for norms, which are not
    in the formula; bytes in host memory are."""
    recompute = RECOMPUTE[way]
    plain = peaks(tmp_path, recompute, None, "1f1b")
    for offload in OFFLOAD[: 1 if way == 0 else 3]:
        away = peaks(tmp_path, recompute, offload, "1f1b")
        for (peak, total, *nothing), (less, estimate, host, known) in zip(plain, away, strict=True):
            assert nothing == [0, 0] and host == known > 0, (recompute, offload)
            saved, expected = peak - less, total - estimate
            assert 0 <= saved - expected <= 2 * 4 * 4 * 1024, (recompute, offload)
        assert away[0][0] < plain[0][0], (recompute, offload)


@pytest.mark.parametrize("way", quick(range(len(RECOMPUTE)), [], [2]))
def test_memory_where_operands_wait_is_the_formula(way: int, tmp_path: Path) -> None:
    """Of device and host, with and without context groups and offload; it counts four messages on their way to the
    stage before, and sends of a dry run end at once."""
    for context, offload in ((False, None), (False, OFFLOAD[0]), (True, None), (True, OFFLOAD[2])):
        ranks = (0, 2) if offload is None or way else (0,)
        for peak, total, host, known in peaks(tmp_path, RECOMPUTE[way], offload, "zero-bubble", context, ranks=ranks):
            assert host == known and (known > 0) == (offload is not None), (way, context, offload)
            assert 1.0 <= total / peak <= 1.05, (way, context, offload, total / peak)


@pytest.mark.parametrize("context", quick([False, True], [], [True]))
def test_memory_where_all_forwards_come_first(context: bool, tmp_path: Path) -> None:
    """Host memory is exact; the device's is short of a dry run by no more than without offload."""
    args = ("elementwise", OFFLOAD[0], "gpipe", context)
    ((peak, total, *_),) = peaks(tmp_path, "elementwise", None, "gpipe", context, ranks=(0,))
    ((less, estimate, host, known),) = peaks(tmp_path, *args, ranks=(0,))
    assert host == known > 0 and less < peak
    assert less - estimate <= max(peak - total, 0) + 0.01 * less


@pytest.mark.slow
def test_what_the_first_layers_keep_is_away_while_the_others_run(tmp_path: Path) -> None:
    """On a stage of its own, where no forward of another micro-batch comes before the backward."""
    run, found = config("fp32", tmp_path, plan([pipe(4, 2, stage([0], [0, 6]))], seq_length=1024)), list[int]()
    run = replace(run, spec=replace(run.spec, hidden_size=256, ffn_hidden_size=768))
    for first in range(4):
        offload = ActivationOffload(first) if first else None
        away = replace(run, plan=run.plan.with_stages(lambda s, a=offload: replace(s, activations=a)))
        found.append(run_rank(away, 0).peak)
        assert 1.0 <= estimate_memory(away.plan, away.spec, away.dtype)[0].total / found[-1] <= 1.02, first
    assert found == sorted(found, reverse=True) and found[3] < 0.9 * found[0]


ALL = {"activations": {"offload": "all"}}


@pytest.mark.parametrize("kind", quick([None, "int8", "nf4", "dora"], [], ["int8"]))
def test_a_frozen_base_stays_where_it_is(kind: str | None) -> None:
    """The result of peft, with adapters on a base of every dtype; the layers are wide enough for blocks of 64."""
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    stages = stage([0, 1], [0, 2], tp=2, recompute="elementwise", **ALL), stage([2], [2, 3], **ALL)
    made = plan([pipe(2, 2, *stages)])
    lora = Lora(3, 6.0, base_dtype=kind if kind in ("int8", "nf4") else None, dora=kind == "dora")
    check_adapters(config, made, lora, Case(4, 4, config, made))


@pytest.mark.parametrize("index", quick(range(3), [], [0]))
def test_experts_and_products_in_fp8_give_the_same_bits(index: int) -> None:
    def made(away: dict[str, Any]) -> Case:
        if index == 0:
            thirds = [{"ranks": [[0, 2], 1], "experts": [[0, 2], [2, 5]], "split": [[2, 1], [1]]}]
            split: dict[str, Any] = {"tp": 3, "tp_split": [2, 1, 1], "experts": thirds}
            config = MOE_FAMILIES["qwen3_moe"]
            return fixed_case(config, plan([pipe(3, 2, stage([0, 1, 2], [0, 2], **split, **away))]))
        fp8 = Fp8("hybrid", ("blockwise", "tensorwise")[index - 1])
        stages = stage([0, 1], [0, 1], tp=2, **away), stage([2], [1, 2], **away)
        return fixed_case(WIDE, plan([pipe(2, 2, *stages)]), fp8=fp8, optimizer="sgd")

    require_equal_bits(made({}), made(ALL), shared_pool())


@pytest.mark.parametrize("kind", quick([None, "int8", "experts"], [], ["int8"]))
def test_host_memory_of_adapters_and_experts_is_the_formula(kind: str | None, tmp_path: Path) -> None:
    """To the byte, but of experts: of these there are a few numbers of each token more."""
    config = MOE_FAMILIES["mixtral"] if kind == "experts" else LLAMA
    config = config | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = load_model(str(tmp_path / "config.json"))
    spec = base if kind == "experts" else adapted(base, Lora(4, 8.0, base_dtype=kind))
    last = spec.num_layers
    made = plan_from_dict(plan([pipe(2, 4, stage([0], [0, 1], **ALL), stage([1], [1, last], **ALL))], 64), spec)
    (tmp_path / "plan.yaml").write_text(dump_yaml(made))
    words = ["--plan", str(tmp_path / "plan.yaml"), "--model", str(tmp_path / "config.json"), "--dry-run"]
    words += [] if kind == "experts" else ["--lora-rank", "4", "--lora-alpha", "8"]
    words += ["--lora-base-dtype", "int8"] if kind == "int8" else []
    run = configure(words, {})
    estimates = estimate_memory(run.plan, run.spec, run.dtype)
    for rank in run.plan.ranks:
        found, known = run_rank(run, rank).activations, estimates[rank].host
        assert known > 0 and (found == known or kind == "experts" and abs(found - known) < 0.1 * known), (rank, kind)
