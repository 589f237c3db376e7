"""``hetero-megatron score``: what a model says of the data, under its own plan, in a file by sample index; and that
file in a run whose teacher the model is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from hetero_megatron.comm import Comm
from hetero_megatron.comm.group import together
from hetero_megatron.data.build import corpus_fingerprint
from hetero_megatron.data.sample import Dataset, LikeliestTokens
from hetero_megatron.data.scored import KIND, ScoredDataset, check_scores, order_of
from hetero_megatron.data.scores_file import ScoresFile, Shapes, create_scores, open_scores
from hetero_megatron.errors import UserError
from hetero_megatron.pipeline.likeliest import Likeliest, Rows, gather_rows, head_ranks
from hetero_megatron.pipeline.stage_model import RankStage, StageModel
from hetero_megatron.plans import stage_at
from hetero_megatron.platform import Platform
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.platform.plugins import Plugins
from hetero_megatron.training.alignment.session import Alignment
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.forward_model import ForwardModel
from hetero_megatron.training.initial_weights import InitialWeights
from hetero_megatron.training.kernels import rank_kernels
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.reference import reference_logps, weights_fingerprint
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.utils.text import plural

SAVE, READ = "--save-scores", "--teacher-scores"


def score(config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, build: Callable[..., Runtime]) -> int:
    """Write the file; returns the exit code. Called on all ranks of the plan, whose groups have been created.

    Args:
        build: see :func:`~hetero_megatron.training.train.build_runtime`.

    Raises:
        UserError: something in configuration or data cannot be honoured; on all ranks.
    """
    asked, world, dtype = config.scores, comm.group(config.plan.ranks), DTYPES[config.dtype]
    assert asked is not None and config.load_hf is not None
    weights, data = InitialWeights(config, world), NodeData(config, comm, world)
    _refuse_streams(data, SAVE)
    if config.preference is not None:
        runtime = build(config, comm, platform, plugins, weights.values, Alignment(config.alignment))
        return _answers(config, runtime, data)
    options = RuntimeOptions(logits_bytes=config.logits_bytes)
    kernels = rank_kernels(
        config.plan, config.spec, comm.rank, plugins.registry, platform, dtype, options, config.deterministic
    )
    likeliest: list[Likeliest] = []

    def ending(here: RankStage, built: StageModel) -> Likeliest:
        group, chunk = comm.group(here.unit.ranks), here.loss_chunk(dtype, config.logits_bytes // 4)
        likeliest.append(Likeliest(here, built.module, kernels, group, chunk, asked.top_k, asked.temperature))
        return likeliest[0]

    model = ForwardModel(config.compiled, comm, dtype, weights.values, kernels, ending)
    to, sources = config.plan.ranks[0], head_ranks(config.plan)
    comm.connect((sources if comm.rank == to else {to} if comm.rank in sources else set()) - {comm.rank})
    splits, start = dict(_splits(config, data)), time.monotonic()
    files: list[ScoresFile] = []
    together(world, lambda: files.append(_create(config, data, splits)) if world.index == 0 else None)
    try:
        for name, (dataset, samples) in splits.items():
            _score_split(config, comm, data, model, likeliest[0] if likeliest else None, files, name, dataset, samples)
        together(world, lambda: files[0].complete() if world.index == 0 else None)
    except BaseException:
        for file in files:
            file.give_up()
        raise
    if world.index == 0:
        done, seconds = sum(samples for _, samples in splits.values()), time.monotonic() - start
        print(f"scores: {plural(done, 'sample')} in {asked.path} in {seconds:.0f} s", flush=True)
    data.close()
    return 0


def _score_split(
    config: RunConfig, comm: Comm, data: NodeData, model: ForwardModel, likeliest: Likeliest | None,
    files: Sequence[ScoresFile], name: str, dataset: Dataset, samples: int,
) -> None:  # fmt: skip
    """``files``: the one that is written, on the first rank."""
    assert config.scores is not None
    world, batch = comm.group(config.plan.ranks), config.plan.global_batch_size
    wrong: list[int] = []  # samples

    def check() -> None:
        if wrong:
            problem = f"what it says of sample {wrong[0]} of {name} is not a number"
            raise UserError(problem, field="--load-hf", value=config.load_hf,
                            accepted="weights without NaN or Inf, or more range than fp16 has")  # fmt: skip

    with data.loader(dataset) as loader:
        for first in range(0, samples, batch):
            with comm.clock.counting():
                model.run(loader, first, batch)
            loader.advance(batch)
            for rows, tokens, values in gather_rows(comm, config.plan, first, batch, config.scores.top_k, likeliest):
                _fill(files[0], name, rows, tokens, values)
                if any(part.isnan().any() for part in values[1:]):
                    wrong.append(rows[0])
            together(world, check)


def _create(config: RunConfig, data: NodeData, splits: Mapping[str, tuple[Dataset, int]]) -> ScoresFile:
    assert config.scores is not None and config.load_hf is not None
    if os.path.lexists(config.scores.path):
        open_scores(config.scores.path, SAVE, KIND)  # nothing else is written over
    facts = dict(_facts(config, data, weights_fingerprint(config.load_hf)))
    facts |= {f"order of {name}": _order(data, *read) for name, read in splits.items()}
    header = {
        "kind": KIND, "made_for": facts, "temperature": config.scores.temperature, "dtype": config.dtype,
    }  # fmt: skip
    shapes = _shapes({name: n for name, (_, n) in splits.items()}, config.plan.seq_length, config.scores.top_k)
    return create_scores(config.scores.path, SAVE, header, shapes)


def _fill(file: ScoresFile, split: str, samples: Sequence[int], tokens: Sequence[int], values: Rows) -> None:
    """Write rows that ranks found, [samples, tokens, ..]."""
    for part, name in zip(values, LikeliestTokens._fields, strict=True):
        into = file.arrays[f"{split}.{name}"]
        for sample, value in zip(samples, part, strict=True):
            into[sample, tokens] = value.numpy()


def _answers(config: RunConfig, runtime: Runtime, data: NodeData) -> int:
    """The same of whole answers: the log-probabilities that --reference-logps reads."""
    assert config.scores is not None
    reference_logps(replace(config, reference_logps=config.scores.path), runtime, data)
    data.close()
    return 0


def use_scores(config: RunConfig, comm: Comm, data: NodeData) -> tuple[str, int]:
    """Have the data of a run bring what the file says of them, on ranks with a head. Called on all ranks.

    Returns:
        the fingerprint of the model whose scores they are, and of how many training samples the file has them.

    Raises:
        UserError: the file is of another model, tokenizer, data or order, or too short; on all ranks.
    """
    path, world = config.teacher_scores, comm.group(config.plan.ranks)
    assert path is not None and config.distillation is not None
    temperature = config.distillation.temperature
    _refuse_streams(data, READ)
    head = stage_at(config.plan, config.plan.places[comm.rank]).head

    def read() -> tuple[str, int] | None:
        if not head:
            return None
        scores, splits = open_scores(path, READ, KIND), dict(_splits(config, data))
        orders = {name: (_order(data, *read), read[1]) for name, read in splits.items()}
        model = None if config.teacher_hf is None else weights_fingerprint(config.teacher_hf)
        check_scores(scores, READ, _facts(config, data, model), orders, config.plan.seq_length, temperature)
        for name, (dataset, samples) in splits.items():
            scored = ScoredDataset(dataset, scores, name, config.spec.vocab_size, READ)
            scored[0], scored[samples - 1]  # what can be refused now is not refused on the way
            data.wrapped[id(dataset)] = scored
        held = len(scores.arrays["train.ids"]) if "train" in splits else 0
        return str(scores.header["made_for"].get("model")), held

    return next(facts for facts in together(world, read, tuple[str, int]) if facts is not None)


def _splits(config: RunConfig, data: NodeData) -> Iterator[tuple[str, tuple[Dataset, int]]]:
    """By name, the data sets of a run, and how many of their first samples it reads; of a run that scores them, in
    whole batches."""
    sets, size = data.datasets, config.plan.global_batch_size
    evaluated = config.evaluation.iterations * size
    if sets.train is not None and not config.skip_train:
        trained = config.train_samples
        yield "train", (sets.train, trained if config.scores is None else -(-trained // size) * size)
    for name, dataset in (("valid", sets.valid), ("test", sets.test)) if evaluated else ():
        if dataset is not None:
            yield name, (dataset, evaluated)


def _facts(config: RunConfig, data: NodeData, model: str | None) -> Mapping[str, str]:
    """What a file depends on, but for the order of each split; ``model`` None: any."""
    settings, sets = config.data, data.datasets
    assert settings is not None
    apart = "across documents", "within documents"
    facts = {
        "tokenizer": sets.tokenizer.fingerprint,
        "vocabulary": f"{config.spec.vocab_size} tokens",
        "length": f"{config.plan.seq_length} tokens",
        "attention": apart[settings.reset_attention_mask or settings.sft],
        "positions": apart[settings.reset_position_ids or settings.sft],
    }
    return facts if model is None else {"model": model, **facts}


def _order(data: NodeData, dataset: Dataset, samples: int) -> str:
    """What is stored, and in which order the first samples of it come; of fewer samples it is the beginning."""
    return f"{corpus_fingerprint(dataset, data.datasets.tokenizer.fingerprint)} {order_of(dataset, samples)}"


def _shapes(samples: Mapping[str, int], length: int, k: int) -> Shapes:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, n in samples.items():
        shapes[f"{name}.ids"] = "<i4", (n, length, k)
        shapes[f"{name}.logps"] = "<f4", (n, length, k)
        shapes[f"{name}.rest"] = "<f4", (n, length)
    return shapes


def _refuse_streams(data: NodeData, flag: str) -> None:
    if data.datasets.in_order:
        problem = "scores are found by the number of a sample, and a stream is read once, in order"
        raise UserError(problem, field=flag, value="a stream", accepted="stored data")
