"""A generator on ranks of its own: it samples the answers that the ranks that train learn from, under its own plan,
with weights that come from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Comm, Group
from hetero_megatron.comm.group import Refusal, together
from hetero_megatron.data.prompts import Prompts
from hetero_megatron.errors import UserError
from hetero_megatron.generation import Decoder, Sampling
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.parallel.empty_stage import fill
from hetero_megatron.platform import Platform
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.platform.plugins import Plugins
from hetero_megatron.spec import LogicalTensor
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.training.answers import PlanSampler, RecordedSampling, chosen_prompts, ends_of_answers
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.generator_client import prompt_marks
from hetero_megatron.training.initial_weights import finite
from hetero_megatron.training.kernels import rank_kernels
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.role_messages import Answer, Request, RolloutRequest
from hetero_megatron.training.weight_transfer import WeightTransfer

if TYPE_CHECKING:
    from hetero_megatron.ops.int8_weight import Scales

# (logical tensor, box) -> values of frozen weights, in host memory
FrozenValues = Callable[[LogicalTensor, Box], torch.Tensor]


class ReceivedWeights:
    """Of a :class:`~hetero_megatron.generation.Decoder`: frozen ones are read once, trained ones come from the ranks
    that train, each time that the decoder asks again.

    Args:
        frozen: of the base of adapters.
    """

    elsewhere: Collection[str] = ()

    def __init__(self, frozen: FrozenValues, transfer: WeightTransfer) -> None:
        self._frozen, self._transfer, self._read = frozen, transfer, False

    def fill(
        self, tensors: Mapping[str, tuple[LogicalTensor, Box, torch.Tensor]], scales: Mapping[str, Scales],
        world: Group,
    ) -> None:  # fmt: skip
        """See :class:`~hetero_megatron.generation.weights.WeightSource`; UserError on all ranks."""

        def read() -> None:
            for tensor, box, param in tensors.values():
                if tensor.trained:
                    param.zero_()  # until its values come
                else:
                    fill(tensor, box, self._frozen, param, scales)

        if not self._read:
            together(world, read)
            self._read = True
            return
        params = {name: param for name, (tensor, _, param) in tensors.items() if tensor.trained}
        self._transfer.receive(params, {name: tensors[name][1] for name in params})


class GeneratorRank:
    """The work of one rank; see :class:`~hetero_megatron.training.role_ranks.RoleWork`.

    Args:
        size: answers of a step.
        corpora: what it reads.
    """

    def __init__(self, g: Grpo, sampler: PlanSampler, prompts: Prompts, size: int, corpora: Mapping[str, str]) -> None:
        self._grpo, self._sampler, self._prompts, self._size = g, sampler, prompts, size
        self.corpora = dict(corpora)

    def work_on(self, request: Request) -> Answer:
        """Sample answers, with new weights where these come. Called on all ranks."""
        assert isinstance(request, RolloutRequest)
        decoder = self._sampler.decoder
        comm = decoder.comm
        with comm.clock.counting():
            if request.sync:
                comm.activity = "receiving weights from the ranks that train"
                decoder.refresh()
            comm.activity = "sampling answers"
            chosen = chosen_prompts(self._grpo, self._prompts, request.first, self._size)
            sampled = self._sampler.sample([prompt.ids for prompt in chosen], request.first)
        if not all(math.isfinite(value) for values in sampled.logps for value in values):
            problem = f"probabilities of answers from {request.first} on are not finite"
            error = UserError(problem, field="roles.generator", accepted="a smaller --lr, or more range than fp16 has")
            return Answer(Refusal.of(error))
        return Answer(sampled=sampled if decoder.world.index == 0 else None)

    def send(self, request: Request) -> None:
        """Nothing: answers travel with what the rank answers."""

    def finish(self) -> None:
        """Nothing is on its way."""


def generator_rank(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, open_loaders: ExitStack
) -> GeneratorRank:
    """Built on every rank of the generator.

    Raises:
        UserError: there is something wrong with the data, or the base of adapters.
    """
    assert config.grpo is not None
    g, compiled, dtype = config.grpo, config.compiled_role, DTYPES[config.dtype]
    plan, spec, world = compiled.plan, compiled.spec, comm.group(compiled.plan.ranks)
    opened = list[tuple[NodeData, FrozenValues, tuple[int, ...]]]()

    def open_all() -> None:
        node_data = NodeData(config, comm, world, log=False)
        opened.append((node_data, _frozen_values(config), ends_of_answers(config, node_data.datasets.tokenizer)))

    together(world, open_all)
    node_data, frozen, ends = opened[0]
    open_loaders.callback(node_data.close)
    prompts = node_data.datasets.train
    assert isinstance(prompts, Prompts)
    weights = ReceivedWeights(frozen, WeightTransfer(comm, config.compiled, compiled))
    kernels = rank_kernels(plan, spec, comm.rank, plugins.registry, platform, dtype)
    decoder = Decoder(plan, spec, comm, dtype, weights, plan.seq_length, kernels)
    sampling = (RecordedSampling if g.may_be_stale else Sampling)(1.0, seed=config.seed, ends=ends)
    sampler = PlanSampler(decoder, sampling, g.max_new_tokens)
    return GeneratorRank(g, sampler, prompts, plan.global_batch_size, prompt_marks(config, node_data.datasets))


def _frozen_values(config: RunConfig) -> FrozenValues:
    """Of weights that are not trained: of --load-hf, or drawn from the seed."""
    spec, seed = config.spec, config.seed
    if config.load_hf is None or spec.lora is None:
        return lambda tensor, box: initial_values(tensor, box, spec, seed)
    from hetero_megatron.checkpoint.hf_load import base_weights

    source = base_weights(config.load_hf, spec)

    def values(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        values_read = source.read(tensor, box)
        return finite(tensor, values_read) if tensor.int8 or tensor.nf4 else values_read

    return values
