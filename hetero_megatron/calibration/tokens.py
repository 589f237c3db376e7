"""Seconds of a token that is generated: of a layer, and of what else it takes, the draw and the program among it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from hetero_megatron.calibration.layers import Job
from hetero_megatron.calibration.measure import LEAST, repeated
from hetero_megatron.calibration.operators import timed
from hetero_megatron.calibration.pipelines import one_rank
from hetero_megatron.comm import Group
from hetero_megatron.generation.decoder import Decoder
from hetero_megatron.generation.sampling import Sampling
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.parallel.empty_stage import fill
from hetero_megatron.predictor.cost.rates import model_fingerprint
from hetero_megatron.spec import LogicalTensor, ModelSpec

ROWS = (1, 8)  # answers at once
DEPTHS = (1, 3)  # layers of the models that tell a layer from the rest
PROMPT, TOKENS = 8, 9  # tokens of a prompt; of its answer, against one
TokenTables = dict[str, list[list[float | str]]]  # rows as in the rates


def measure_tokens(job: Job, models: Sequence[ModelSpec], calls: int) -> TokenTables:
    """Rows of ``decode_layers`` and ``decode_head`` for each of ``models`` that are dense, without tensor parallelism:
    medians of ``calls`` answers each. Every rank measures by itself."""
    tables: TokenTables = {"decode_layers": [], "decode_head": []}
    for model in (model for model in models if model.moe is None):
        few, many = (_seconds(job, replace(model, num_layers=depth), calls) for depth in DEPTHS)
        for rows, short, long in zip(ROWS, few, many, strict=True):
            layer = max((long - short) / (DEPTHS[1] - DEPTHS[0]), LEAST)
            rest = max(short - DEPTHS[0] * layer, LEAST)
            for table, seconds in zip(tables.values(), (layer, rest), strict=True):
                table.append([model_fingerprint(model), 1, rows, 1, seconds, seconds])
    return {name: table for name, table in tables.items() if table}


def _seconds(job: Job, model: ModelSpec, calls: int) -> list[float]:
    """Of one more token of each of some rows, on this rank alone, for each of ``ROWS``."""
    comm, plan = job.comm, one_rank(job.comm.rank, model, max(ROWS), PROMPT + TOKENS)
    comm.create_groups([(comm.rank,)])
    kernels = job.kernels_of(plan, model, True)
    decoder = Decoder(plan, model, comm, job.dtype, _Drawn(model), PROMPT + TOKENS, kernels)
    sampling = Sampling(temperature=1.0)

    def more(rows: int) -> list[float]:
        prompts = [[(row + i) % model.vocab_size for i in range(PROMPT)] for row in range(rows)]
        answers = (partial(decoder.generate, prompts, 0, count, sampling) for count in (1, TOKENS))
        one, all_tokens = timed(comm.clock, *answers)
        return [(all_tokens - one) / (TOKENS - 1)]

    return [seconds for rows in ROWS for seconds, _ in repeated(partial(more, rows), calls)]


class _Drawn:
    """Weights of a new model, which make no difference here."""

    elsewhere = ()

    def __init__(self, model: ModelSpec) -> None:
        self._values = partial(initial_values, spec=model, seed=0)

    def fill(
        self, tensors: Mapping[str, tuple[LogicalTensor, Box, torch.Tensor]], scales: Mapping[str, object], _: Group
    ) -> None:
        for tensor, box, param in tensors.values():
            fill(tensor, box, self._values, param, scales)  # type: ignore[arg-type]
