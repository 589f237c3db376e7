"""The reference's log-probabilities of all pairs of a run, computed once before the first step, by the weights that the
run begins with, or those of --reference-hf; and kept in a file (--reference-logps) that another run on the same pairs
reads."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hetero_megatron.comm import Group
from hetero_megatron.comm.group import together
from hetero_megatron.data.batch import Batch
from hetero_megatron.data.sample import Dataset
from hetero_megatron.data.scores_file import create_scores, open_scores
from hetero_megatron.errors import UserError
from hetero_megatron.pipeline.step_work import Fetch
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.initial_weights import InitialWeights
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.utils.text import plural

FLAG = "--reference-logps"
KIND = "reference log-probabilities"
PLACES, WIDTH = 256, 4096  # of a file of weights that are looked at, and bytes at each
BLOCK = 1 << 16  # pairs that are told to other ranks at once

# By number of a pair: of the chosen and of the rejected answer; of an example: of its answer and of another one's.
PairLogps = dict[int, tuple[float, float]]


def reference_logps(config: RunConfig, runtime: Runtime, data: NodeData) -> PairLogps:
    """See the module docstring. Called on all ranks of a run with a stored reference, whose weights those of
    ``runtime`` are.

    Raises:
        UserError: the file is of another model, tokenizer or data; on all ranks.
    """
    world, path, facts = runtime.world, config.reference_logps, _facts(config, data)
    stored: list[PairLogps] = []
    together(world, lambda: stored.append(_read(path, facts) if world.index == 0 and path is not None else {}))
    logps = _spread(world, stored[0])
    stored_count, start = len(logps), time.monotonic()
    for dataset, samples in _needed(config, data):
        with data.loader(dataset) as loader:
            _compute(runtime, loader, dataset, samples, config.plan.global_batch_size, logps)
    if len(logps) > stored_count and world.index == 0:
        summary = f"reference: log-probabilities of {plural(len(logps) - stored_count, 'pair')} computed"
        print(f"{summary} in {time.monotonic() - start:.0f} s{'' if path is None else f', for {path}'}", flush=True)
    if path is not None and len(logps) > stored_count:
        together(world, lambda: _write(path, facts, logps) if world.index == 0 else None)
    if runtime.pairs is not None:
        runtime.pairs.reference.begin_step()
    return logps


def logps_of_another_model(config: RunConfig, world: Group, build: Callable[..., Runtime], data: NodeData) -> PairLogps:
    """What the model in --reference-hf says of the run's pairs, built and given up again before the run's own.

    Args:
        world: the ranks of the plan.
        build: the runtime of (``config``, ``initialize``).
    """
    other = replace(config, load_hf=config.reference_hf)
    weights = InitialWeights(other, world)
    runtime = build(config=other, initialize=weights.values)
    return reference_logps(config, runtime, data)


def use_reference(config: RunConfig, runtime: Runtime, data: NodeData, logps: PairLogps | None) -> int | None:
    """Have the loss of preferences know what the reference says; ``logps``: None: the runtime's weights are its.

    Returns:
        of how many training samples that is known; None: of all.
    """
    assert config.preference is not None
    covered, apart = None, config.role is not None
    if config.preference.stored and not apart:
        covered = covered_samples(config, data)
        logps = reference_logps(config, runtime, data) if logps is None else logps
    if config.preference.unpaired:
        from hetero_megatron.training.labelled import LabelledSteps

        runtime.hooks.before_forward = LabelledSteps(runtime).before_forward
    if not apart:
        know_reference(runtime, logps or {})
    return covered


def know_reference(runtime: Runtime, logps: Mapping[int, tuple[float, float]]) -> None:
    """Have the loss of preferences know what the reference says of some pairs or examples, and nothing else."""
    assert runtime.options.preference is not None
    if runtime.options.preference.unpaired:
        from hetero_megatron.training.labelled import LabelledSteps

        LabelledSteps(runtime).use(logps)
    elif runtime.pairs is not None:
        runtime.pairs.reference.logps = dict(logps)


def _needed(config: RunConfig, data: NodeData) -> Iterable[tuple[Dataset, int]]:
    """The data sets of the run, and how many of their first samples it reads."""
    sets, evaluated = data.datasets, config.evaluation.iterations * config.plan.global_batch_size
    if sets.train is not None and not config.skip_train:
        yield sets.train, config.train_samples
    for dataset in (sets.valid, sets.test) if evaluated else ():
        if dataset is not None:
            yield dataset, evaluated


def covered_samples(config: RunConfig, data: NodeData) -> int | None:
    """Of how many training samples all answers are known then; None: of all."""
    packs = getattr(data.datasets.train, "num_packs", None)
    return None if packs is not None and packs <= config.train_samples else config.train_samples


def _compute(
    runtime: Runtime, loader: Fetch, dataset: Dataset, samples: int, batch: int, logps: PairLogps
) -> None:
    """Add what is missing of the first ``samples`` of a data set. Called on all ranks."""
    epoch_samples = getattr(dataset, "num_packs", samples)  # the first epoch has every pair
    batch_samples: list[int] = []
    numbers: set[int] = set()
    for index in range(min(samples, epoch_samples)):
        sample_pairs = dataset[index].pairs or ()
        if missing := [number for number in sample_pairs if number not in logps and number not in numbers]:
            batch_samples.append(index)
            numbers.update(missing)
        if len(batch_samples) == batch or (batch_samples and index + 1 == min(samples, epoch_samples)):
            _record(runtime, loader, batch_samples, batch, sorted(numbers), logps)
            batch_samples, numbers = [], set()
    if batch_samples:
        _record(runtime, loader, batch_samples, batch, sorted(numbers), logps)


def _record(
    runtime: Runtime, loader: Fetch, chosen: Sequence[int], batch: int, numbers: Sequence[int], logps: PairLogps
) -> None:
    """``chosen``: samples of at most one global batch, which the last one fills up; ``numbers``: the pairs of them that
    are wanted."""
    rows = [*chosen, *[chosen[-1]] * (batch - len(chosen))]

    def fetch(indices: Sequence[int]) -> Batch:
        return loader([rows[i] for i in indices])

    runtime.warm_up(fetch, 0, batch, forward_only=True)
    with runtime.comm.clock.counting():
        own_logps = _recorded(runtime, fetch, batch)
    unknown = (float("nan"), float("nan"))
    vector = torch.tensor([own_logps.get(number, unknown) for number in numbers], dtype=torch.float64)
    gathered = runtime.world.gather_vectors(vector.flatten())
    # Several ranks may know a pair, and all the same.
    first_known = (~gathered.isnan()).to(torch.int8).argmax(0, keepdim=True)
    values = gathered.gather(0, first_known).view(-1, 2).tolist()
    logps.update((number, (chosen, rejected)) for number, (chosen, rejected) in zip(numbers, values, strict=True))


def _recorded(runtime: Runtime, fetch: Fetch, batch: int) -> Mapping[int, tuple[float, ...]]:
    preference = runtime.options.preference
    if preference is not None and preference.unpaired:
        from hetero_megatron.training.labelled import LabelledSteps

        steps = LabelledSteps(runtime)
        steps.record(fetch, 0, batch)
        return steps.recorded()
    runtime.record_reference(fetch, 0, batch)
    return runtime.pairs.reference.recorded() if runtime.pairs is not None else {}


def _spread(world: Group, logps: PairLogps) -> PairLogps:
    """What the first rank of the group knows, on all of them."""
    own_rows = torch.tensor([[n, *values] for n, values in logps.items()], dtype=torch.float64).view(-1, 3)
    count = int(world.gather_vectors(torch.tensor([len(own_rows)]))[0, 0])
    spread: PairLogps = {}
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        block = own_rows[start : start + size] if world.index == 0 else torch.zeros(size, 3, dtype=torch.float64)
        rows = world.gather_vectors(block.flatten())[0].view(-1, 3).tolist()
        spread |= {int(number): (chosen, rejected) for number, chosen, rejected in rows}
    return spread


def _facts(config: RunConfig, data: NodeData) -> Mapping[str, str]:
    """What the numbers of pairs, and their log-probabilities, depend on."""
    lora, settings, sets = config.spec.lora, config.data, data.datasets
    assert settings is not None
    base = config.dtype if lora is None or lora.base_dtype is None else f"{config.dtype} over {lora.base_dtype}"
    numbered = " ".join(f"{name} {mark}" for name, mark in sets.corpora.items())
    preference = config.preference
    kind = {} if preference is None or not preference.unpaired else {"loss": preference.loss}
    return {
        **kind,
        "model": reference_fingerprint(config),
        "dtype": base,
        "tokenizer": sets.tokenizer.fingerprint,
        "data": numbered,
        "samples": f"{config.plan.seq_length} tokens, {settings.overlong_samples}",
    }


def reference_fingerprint(config: RunConfig) -> str:
    """Of the weights that a run's reference, or its teacher, has; empty without one."""
    if config.teacher_hf is not None:
        return weights_fingerprint(config.teacher_hf)
    preference = config.preference
    if preference is None or not preference.refers:
        return ""
    directory = config.reference_hf or config.load_hf
    return f"seed {config.seed}" if directory is None else weights_fingerprint(directory)


def weights_fingerprint(directory: str) -> str:
    """16 hex digits of the safetensors in a directory: their names, sizes and bytes at places all over them."""
    digest = hashlib.sha256()
    for path in sorted(Path(directory).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\0".encode())
        with path.open("rb") as file:
            for place in range(PLACES if size > PLACES * WIDTH else 1):
                file.seek(place * max(size - WIDTH, 0) // max(PLACES - 1, 1))
                digest.update(file.read(WIDTH if size > PLACES * WIDTH else -1))
    return digest.hexdigest()[:16]


def _read(path: str, facts: Mapping[str, str]) -> PairLogps:
    """UserError: the file is damaged, or of something else."""
    if not os.path.lexists(path):
        return {}
    scores = open_scores(path, FLAG, KIND)
    scores.require(FLAG, facts)
    numbers, logps = scores.arrays.get("numbers"), scores.arrays.get("logps")
    shaped = numbers is not None and numbers.ndim == 1 and numbers.dtype == np.int64
    if numbers is None or logps is None or not shaped or logps.shape != (len(numbers), 2):
        raise UserError("holds a pair without two numbers", field=FLAG, value=path, accepted="a new name")
    for start in range(0, len(numbers), BLOCK):  # before all of them are in memory
        part, values = numbers[start : start + BLOCK + 1], logps[start : start + BLOCK]
        if part[0] < 0 or not (np.diff(part) > 0).all() or not np.isfinite(values).all():
            problem = "is damaged: numbers of pairs do not ascend, or a log-probability is not finite"
            raise UserError(problem, field=FLAG, value=path, accepted="a new name")
    return {number: (first, second) for number, (first, second) in zip(numbers.tolist(), logps.tolist(), strict=True)}


def _write(path: str, facts: Mapping[str, str], logps: PairLogps) -> None:
    numbers = sorted(logps)
    shapes = {"numbers": ("<i8", (len(logps),)), "logps": ("<f8", (len(logps), 2))}
    scores = create_scores(path, FLAG, {"kind": KIND, "made_for": dict(facts)}, shapes)
    scores.arrays["numbers"][:] = numbers
    scores.arrays["logps"][:] = [logps[number] for number in numbers]
    scores.complete()
