"""The ranks of a role: they do what the ranks that train ask for, under a plan of their own. A teacher or a reference
runs forward on the batches that these name; a generator samples answers (``generator_ranks.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import Protocol

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.comm.group import Group, Refusal, together
from hetero_megatron.data.batch import Batch, BatchLoader
from hetero_megatron.emulation import Emulation
from hetero_megatron.errors import UserError
from hetero_megatron.ops import KernelPlan
from hetero_megatron.pipeline.likeliest import Likeliest, unpacked
from hetero_megatron.pipeline.preference import PairLoss, Reference, pair_loss
from hetero_megatron.pipeline.role_scores import packed_answers, unpacked_answers
from hetero_megatron.pipeline.stage_model import RankStage, StageLoss, StageModel
from hetero_megatron.pipeline.stage_work import LossFunction
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.platform import Platform
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.platform.plugins import Plugins
from hetero_megatron.training.config import AdapterConfig, RunConfig
from hetero_megatron.training.exit import ExitConditions
from hetero_megatron.training.forward_model import ForwardModel
from hetero_megatron.training.initial_weights import InitialWeights
from hetero_megatron.training.kernels import rank_kernels
from hetero_megatron.training.labelled import mismatched
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.role_client import SPLITS, corpora, role_transfer
from hetero_megatron.training.role_messages import Answer, BatchRequest, Instruction, Request, meet, meeting_group
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.teacher import check_tokenizer


def run_role(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation, exit: ExitConditions
) -> int:
    """Serve the ranks that train until they say that the run is over; returns its exit code. Called on all ranks of the
    role, whose groups have been created.

    Args:
        exit: what this rank is told, as those that train are.

    Raises:
        UserError: what ended the run, or kept this one from its part of it.
        CommError: a peer is gone.
    """
    work: RoleWork | None = None
    with ExitStack() as open_loaders:
        try:
            work = _work(config, comm, platform, plugins, open_loaders)
            answer = Answer(data=work.corpora)
        except UserError as error:
            answer = Answer(Refusal.of(error))
        emulation.started()
        meeting = meeting_group(config, comm)
        assert meeting is not None
        instruction = serve(meeting, config.plan.ranks[0], work, answer, exit)
    if instruction.problem is not None:
        raise instruction.problem.error()
    return instruction.code


class RoleWork(Protocol):
    """What a role does on one of its ranks.

    Attributes:
        corpora: what it reads, for comparisons with the ranks that train.
    """

    corpora: dict[str, str]

    def work_on(self, request: Request) -> Answer:
        """What is asked for; called on all ranks of the role."""

    def send(self, request: Request) -> None:
        """Start to send what came of the last request."""

    def finish(self) -> None:
        """Wait until that has left."""


def _work(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, open_loaders: ExitStack
) -> RoleWork:
    assert config.role is not None
    if config.role.name != GENERATOR:
        return RoleBatches(config, comm, platform, plugins, open_loaders)
    from hetero_megatron.training.generator_ranks import generator_rank

    return generator_rank(config, comm, platform, plugins, open_loaders)


def serve(
    meeting: Group, first: int, work: RoleWork | None, answer: Answer, exit: ExitConditions
) -> Instruction:
    """Follow the instructions of the model that is trained, which rank ``first`` gives; returns the last one.

    Args:
        work: None: it could not be made, as ``answer`` says.
    """
    request: Request | None = None
    while True:
        exit.check(0)
        meeting.comm.activity = "waiting for the model that is trained"
        instruction, answer = meet(meeting, first, replace(answer, stop=exit.reason))
        if instruction.ends:
            if instruction.problem is None and work is not None:  # else the receiver may be gone
                work.finish()
            return instruction
        if answer.problem is not None and (request is None or instruction.send):
            continue  # at the start, or in a batch that is wanted: the ranks that train raise it, and end the run
        assert work is not None
        if instruction.send and request is not None:
            work.send(request)
        request = instruction.next
        answer = Answer() if request is None else work.work_on(request)


class Said(Protocol):
    """What a role says on one of its ranks.

    Attributes:
        options: of the kernels that it needs.
        packed_rows: by the samples of a micro-batch of the last batch, what travels; empty on ranks without a head.
    """

    options: RuntimeOptions
    packed_rows: dict[tuple[int, ...], torch.Tensor]

    def ending(self, here: RankStage, built: StageModel) -> LossFunction:
        """In place of the loss of a stage with a head."""

    def hear(self, model: ForwardModel, batches: Mapping[tuple[int, ...], Batch], first: int, size: int) -> None:
        """Run ``model`` forward on a batch, whose rows of this rank are ``batches``; called on all ranks."""

    def unsound(self) -> int | None:
        """A sample of which something that is no number was said; None: there is none."""


class TeacherSaid:
    """The likeliest tokens of each position."""

    def __init__(self, config: RunConfig, comm: Comm, kernels: Callable[[], KernelPlan]) -> None:
        self.options = RuntimeOptions(logits_bytes=config.logits_bytes)
        self.packed_rows = dict[tuple[int, ...], torch.Tensor]()
        self._config, self._comm, self._kernels = config, comm, kernels

    def ending(self, here: RankStage, built: StageModel) -> LossFunction:
        config, dtype = self._config, DTYPES[self._config.dtype]
        assert config.role is not None and config.distillation is not None
        group, chunk = self._comm.group(here.unit.ranks), here.loss_chunk(dtype, config.logits_bytes // 4)
        temperature = config.distillation.temperature
        likeliest = Likeliest(here, built.module, self._kernels(), group, chunk, config.role.top_k, temperature)
        self.packed_rows = likeliest.packed_rows
        return likeliest

    def hear(self, model: ForwardModel, batches: Mapping[tuple[int, ...], Batch], first: int, size: int) -> None:
        self.packed_rows.clear()
        model.run(lambda rows: batches[tuple(rows)], first, size)

    def unsound(self) -> int | None:
        for samples, rows in self.packed_rows.items():
            _, logps, others = unpacked(rows)
            if logps.isnan().any() or others.isnan().any():
                return samples[0]
        return None


class ReferenceSaid:
    """The log-probabilities of whole answers; of labelled ones also those of prompts with others' answers, where the
    loss needs them."""

    def __init__(self, config: RunConfig, comm: Comm, kernels: Callable[[], KernelPlan]) -> None:
        assert config.preference is not None
        self.options = RuntimeOptions(logits_bytes=config.logits_bytes, preference=config.preference)
        self.packed_rows = dict[tuple[int, ...], torch.Tensor]()
        self._config, self._comm, self._kernels, self._preference = config, comm, kernels, config.preference
        self._loss: PairLoss | None = None

    def ending(self, here: RankStage, built: StageModel) -> LossFunction:
        group, chunk = self._comm.group(here.unit.ranks), here.loss_chunk(DTYPES[self._config.dtype],
                                                                          self._config.logits_bytes)  # fmt: skip
        tokens = StageLoss(here, built.module, self._kernels(), group, chunk)
        self._loss = pair_loss(here, self._comm, self._preference, tokens)
        return self._loss

    def hear(self, model: ForwardModel, batches: Mapping[tuple[int, ...], Batch], first: int, size: int) -> None:
        self.packed_rows.clear()

        def fetch(rows: Sequence[int]) -> Batch:
            return batches[tuple(rows)]

        loss = self._loss
        with nullcontext() if loss is None else loss.record():
            model.run(fetch, first, size)
        others = dict[int, tuple[float, ...]]()
        if self._preference.estimates_kl:
            beside = Reference()
            with nullcontext() if loss is None else loss.record(beside):
                model.run(mismatched(fetch), first, size)
            others = beside.recorded()
        if loss is None:
            return
        recorded, slots = loss.reference.recorded(), model.here.plan.seq_length
        logps = {n: (said[0], said[1] if len(said) == 2 else others.get(n, (0.0,))[0]) for n, said in recorded.items()}
        for samples, batch in batches.items():
            assert batch.pairs is not None
            rows = packed_answers(batch.pairs.numbers, batch.pairs.by_sample, logps, slots)
            self.packed_rows[samples] = rows.to(self._comm.device)

    def unsound(self) -> int | None:
        for samples, rows in self.packed_rows.items():
            if not all(map(isfinite, chain.from_iterable(unpacked_answers({samples: rows}).values()))):
                return samples[0]
        return None


SAID: Mapping[str, type[TeacherSaid | ReferenceSaid]] = {"reference": ReferenceSaid, "teacher": TeacherSaid}


class RoleBatches:
    """The model and data of a role on one of its ranks.

    Attributes:
        corpora: what it reads.

    Raises:
        UserError: the model has another tokenizer or other tensors than it says, or there is something wrong with the
            data.
    """

    def __init__(
        self, config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, open_loaders: ExitStack
    ) -> None:
        assert config.role is not None
        role, compiled, dtype = config.role, config.compiled_role, DTYPES[config.dtype]
        plan, spec = compiled.plan, compiled.spec
        self._comm, self._world, self._role = comm, comm.group(plan.ranks), role
        self._transfer = role_transfer(config, comm)
        role_config = replace(config, plan=plan, spec=spec, load_hf=role.hf, adapter=AdapterConfig())
        weights = InitialWeights(role_config, self._world)
        node_data = NodeData(role_config, comm, self._world, log=False)
        data = node_data.datasets
        check_tokenizer(role.hf, data.tokenizer, role.flag)
        self.corpora = corpora(data)
        self._loaders: Mapping[str, BatchLoader] = {
            name: open_loaders.enter_context(node_data.loader(getattr(data, name)))
            for name in SPLITS if getattr(data, name) is not None
        }  # fmt: skip
        open_loaders.callback(node_data.close)
        self._said: Said = SAID[role.name](config, comm, lambda: kernels)
        options, registry = self._said.options, plugins.registry
        kernels = rank_kernels(plan, spec, comm.rank, registry, platform, dtype, options, config.deterministic)
        self._model = ForwardModel(compiled, comm, dtype, weights.values, kernels, self._said.ending)

    def send(self, request: Request) -> None:
        """What is said of this rank's micro-batches of the last batch."""
        assert isinstance(request, BatchRequest)
        self._transfer.send(self._said.packed_rows, request.first, request.size)

    def finish(self) -> None:
        """See :class:`RoleWork`."""
        self._transfer.finish()

    def work_on(self, request: Request) -> Answer:
        """Run forward on a batch. Called on all ranks."""
        assert isinstance(request, BatchRequest)
        loader, batches = self._loaders[request.split], dict[tuple[int, ...], Batch]()

        def read() -> None:
            for rows in self._model.rows(request.first, request.size):
                if rows:
                    batches[tuple(rows)] = loader(rows)

        try:
            together(self._world, read)  # else a rank would wait for what another one could not read
            with self._comm.clock.counting():
                self._said.hear(self._model, batches, request.first, request.size)
            loader.advance(request.size)
            if (sample := self._said.unsound()) is not None:
                raise UserError(
                    f"what it says of sample {sample} of {request.split} is not a number", field=self._role.flag,
                    value=self._role.hf, accepted="weights without NaN or Inf, or more range than fp16 has",
                )  # fmt: skip
        except UserError as error:
            return Answer(Refusal.of(error))
        return Answer()
