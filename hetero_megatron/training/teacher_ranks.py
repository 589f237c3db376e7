"""A teacher on ranks of its own: it runs forward under its own plan, on the batches that the student's ranks name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.comm.group import Refusal, together
from hetero_megatron.data.batch import Batch, BatchLoader
from hetero_megatron.emulation import Emulation
from hetero_megatron.errors import UserError
from hetero_megatron.pipeline.likeliest import Likeliest, unpacked
from hetero_megatron.pipeline.stage_model import RankStage, StageModel
from hetero_megatron.platform import Platform
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.platform.plugins import Plugins
from hetero_megatron.training.config import AdapterConfig, RunConfig
from hetero_megatron.training.exit import ExitConditions
from hetero_megatron.training.forward_model import ForwardModel
from hetero_megatron.training.initial_weights import InitialWeights
from hetero_megatron.training.kernels import rank_kernels
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.teacher import check_tokenizer
from hetero_megatron.training.teacher_client import (
    SPLITS,
    Answer,
    BatchRequest,
    Instruction,
    corpora,
    meet,
    meeting_group,
    score_transfer,
)


def run_teacher(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation, exit: ExitConditions
) -> int:
    """Serve the student's ranks until they say that the run is over; returns its exit code. Called on all ranks of the
    teacher, whose groups have been created.

    Args:
        exit: what this rank is told, as the student's ranks are.

    Raises:
        UserError: what ended the student's run, or kept this one from its part of it.
        CommError: a peer is gone.
    """
    scorer = None
    with ExitStack() as open_loaders:
        try:
            scorer = BatchScorer(config, comm, platform, plugins, open_loaders)
            answer = Answer(data=scorer.corpora)
        except UserError as error:
            answer = Answer(Refusal.of(error))
        emulation.started()
        instruction = _serve(config, comm, scorer, answer, exit)
    if instruction.problem is not None:
        raise instruction.problem.error()
    return instruction.code


def _serve(
    config: RunConfig, comm: Comm, scorer: BatchScorer | None, answer: Answer, exit: ExitConditions
) -> Instruction:
    """Follow the student's instructions; returns the last one.

    Args:
        scorer: None: it could not be made, as ``answer`` says.
    """
    meeting, transfer = meeting_group(config, comm), score_transfer(config, comm)
    assert meeting is not None
    request: BatchRequest | None = None
    while True:
        exit.check(0)
        comm.activity = "waiting for the student"
        instruction, answer = meet(meeting, config.plan.ranks[0], replace(answer, stop=exit.reason))
        if instruction.ends:
            return instruction
        if answer.problem is not None and (request is None or instruction.send_scores):
            continue  # at the start, or in a batch that is wanted: the student's ranks raise it, and end the run
        assert scorer is not None
        if instruction.send_scores and request is not None:
            transfer.send(scorer.found, request.first, request.size)
        request = instruction.next
        answer = Answer() if request is None else scorer.score(request)


class BatchScorer:
    """The teacher's model and data on one of its ranks.

    Attributes:
        corpora: what it reads.

    Raises:
        UserError: the model has another tokenizer or other tensors than it says, or there is something wrong with the
            data.
    """

    def __init__(
        self, config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, open_loaders: ExitStack
    ) -> None:
        assert config.role is not None and config.distillation is not None
        teacher, compiled, dtype = config.role, config.compiled_role, DTYPES[config.dtype]
        plan, spec, temperature = compiled.plan, compiled.spec, config.distillation.temperature
        world = comm.group(plan.ranks)
        self._comm, self._world, self._hf = comm, world, teacher.hf
        own = replace(config, plan=plan, spec=spec, load_hf=teacher.hf, adapter=AdapterConfig())
        weights, node_data = InitialWeights(own, world), NodeData(own, comm, world, log=False)
        data = node_data.datasets
        check_tokenizer(teacher.hf, data.tokenizer, "--teacher-hf")
        self.corpora = corpora(data)
        self._loaders: Mapping[str, BatchLoader] = {
            name: open_loaders.enter_context(node_data.loader(getattr(data, name)))
            for name in SPLITS if getattr(data, name) is not None
        }  # fmt: skip
        open_loaders.callback(node_data.close)
        options = RuntimeOptions(logits_bytes=config.logits_bytes)
        kernels = rank_kernels(
            plan, spec, comm.rank, plugins.registry, platform, dtype, options, config.deterministic
        )
        self._likeliest: Likeliest | None = None

        def ending(here: RankStage, built: StageModel) -> Likeliest:
            group, chunk = comm.group(here.unit.ranks), here.loss_chunk(dtype, config.logits_bytes // 4)
            self._likeliest = Likeliest(here, built.module, kernels, group, chunk, teacher.top_k, temperature)
            return self._likeliest

        self._model = ForwardModel(compiled, comm, dtype, weights.values, kernels, ending)

    @property
    def found(self) -> Mapping[tuple[int, ...], torch.Tensor]:
        """Scores of this rank's micro-batches of the last batch."""
        return self._likeliest.found if self._likeliest is not None else {}

    def score(self, request: BatchRequest) -> Answer:
        """Run forward on a batch. Called on all ranks."""
        loader, batches = self._loaders[request.split], dict[tuple[int, ...], Batch]()
        if self._likeliest is not None:
            self._likeliest.found.clear()

        def read() -> None:
            for rows in self._model.rows(request.first, request.size):
                if rows:
                    batches[tuple(rows)] = loader(rows)

        try:
            together(self._world, read)  # else a rank would wait for what another one could not read
            with self._comm.clock.counting():
                self._model.run(lambda rows: batches[tuple(rows)], request.first, request.size)
            loader.advance(request.size)
            self._check(request.split)
        except UserError as error:
            return Answer(Refusal.of(error))
        return Answer()

    def _check(self, split: str) -> None:
        for samples, rows in self.found.items():
            _, logps, others = unpacked(rows)
            if logps.isnan().any() or others.isnan().any():
                raise UserError(
                    f"its score of sample {samples[0]} of {split} is not a number", field="--teacher-hf",
                    value=self._hf, accepted="weights without NaN or Inf, or more range than fp16 has",
                )  # fmt: skip
