"""A teacher on the ranks of its student: its weights read, its tokenizer compared, and its forward before each step; or
its scores from a file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from hetero_megatron.comm.group import together
from hetero_megatron.data.batch import BatchLoader
from hetero_megatron.data.scored import ScoredDataset
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from hetero_megatron.errors import UserError
from hetero_megatron.pipeline.distillation import DistillationLoss
from hetero_megatron.pipeline.step_work import Fetch
from hetero_megatron.platform import Platform
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.platform.plugins import Plugins
from hetero_megatron.training.config import AdapterConfig, RunConfig
from hetero_megatron.training.forward_model import Teacher
from hetero_megatron.training.initial_weights import InitialWeights
from hetero_megatron.training.kernels import rank_kernels
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions


def add_teacher(
    config: RunConfig, runtime: Runtime, platform: Platform, plugins: Plugins, tokenizer: Tokenizer | None
) -> None:
    """Run the teacher of ``config`` before each step and evaluation of ``runtime``, or have all ranks check the scores
    in a file together. Called on all ranks.

    Raises:
        UserError: it has another vocabulary than ``tokenizer``, or other tensors than its configuration says.
    """
    if config.role is None:
        runtime.hooks.before_forward = partial(_check_scores, runtime)
        return
    teacher_config, compiled, world = config.role, config.compiled_role, runtime.world
    together(world, lambda: check_tokenizer(teacher_config.hf, tokenizer, "--teacher-hf") if world.index == 0 else None)
    teacher_run = replace(config, load_hf=teacher_config.hf, spec=teacher_config.spec, adapter=AdapterConfig())
    weights, dtype = InitialWeights(teacher_run, world), DTYPES[config.dtype]
    options = RuntimeOptions(logits_bytes=config.logits_bytes)
    comm, registry = runtime.comm, plugins.registry
    kernels = rank_kernels(
        compiled.plan, teacher_config.spec, comm.rank, registry, platform, dtype, options, config.deterministic
    )
    loss = runtime.loss if isinstance(runtime.loss, DistillationLoss) else None
    teacher = Teacher(compiled, comm, dtype, weights.values, kernels, loss)
    runtime.hooks.before_forward = teacher.before_forward


def _check_scores(runtime: Runtime, fetch: Fetch, first_sample: int, batch_size: int) -> None:
    """UserError on all ranks where one finds no scores of a sample of the batch in the file, or damaged ones: else that
    one would end, and the others lose a peer."""

    def check() -> None:
        if isinstance(fetch, BatchLoader) and isinstance(fetch.dataset, ScoredDataset):
            for rows in runtime.step_work.samples(first_sample, batch_size)[1]:
                for index in rows:
                    fetch.dataset.scores(index)

    together(runtime.world, check)


def check_tokenizer(directory: str, tokenizer: Tokenizer | None, flag: str) -> None:
    """UserError where a model's directory holds a tokenizer with other tokens than the run's."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not (Path(directory) / "tokenizer.json").exists():
        return
    teacher_tokens, own_tokens = HuggingFaceTokenizer(directory).tokens(), tokenizer.tokens()
    if teacher_tokens == own_tokens:
        return
    unlike = next(word for word in (*own_tokens, *teacher_tokens) if own_tokens.get(word) != teacher_tokens.get(word))
    raise UserError(
        f"its tokenizer is another one: {unlike!r} is token {teacher_tokens.get(unlike)}, "
        f"here {own_tokens.get(unlike)}",
        field=flag, value=directory, accepted="a model with the tokenizer of the run",
    )  # fmt: skip
