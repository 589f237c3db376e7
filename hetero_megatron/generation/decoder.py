"""One rank of a plan that generates: prompts through all stages at once, then one token per row at a time.

Of a stage with several tensor-parallel groups (inner data or context parallelism) the first one works; of several
pipelines each has a part of the prompts. Every rank of a pipeline knows all tokens chosen so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.generation.cache import Rows, apply_cache, drop_cache
from hetero_megatron.generation.sampling import PromptRow, Sampling
from hetero_megatron.generation.weights import WeightSource
from hetero_megatron.layout import cut
from hetero_megatron.model import GPTStage, StagePart
from hetero_megatron.ops import KernelPlan
from hetero_megatron.parallel.collectives import gather_tokens
from hetero_megatron.parallel.dora import RowNorms
from hetero_megatron.parallel.empty_stage import empty_stage
from hetero_megatron.parallel.experts import apply_expert_parallel
from hetero_megatron.parallel.tensor import apply_tensor_parallel
from hetero_megatron.plans import Plan, Stage, locate
from hetero_megatron.spec import ModelSpec, shares


@dataclass(frozen=True)
class _Batch:
    """What the model needs to know besides tokens."""

    positions: torch.Tensor
    documents: None = None
    draws: None = None
    loss_mask: None = None
    ahead: tuple[()] = ()


class Decoder:
    """Built on every rank of the plan, whose groups have been created.

    Args:
        weights: read once, those of a model that is trained, or what comes from there.
        length: most tokens of a prompt with its answer.
        kernels: of this rank's stage.

    Attributes:
        works: this rank takes part; others only wait.
    """

    def __init__(
        self, plan: Plan, spec: ModelSpec, comm: Comm, dtype: torch.dtype, weights: WeightSource,
        length: int, kernels: KernelPlan,
    ) -> None:  # fmt: skip
        self.plan, self.spec, self.comm, self.dtype = plan, spec, comm, dtype
        self.place = locate(plan, comm.rank)
        self.pipeline = plan.pipelines[self.place.pipeline]
        self.stages: Sequence[Stage] = self.pipeline.stages
        self.works = self.place.unit == 0
        self.world = comm.group(plan.ranks)
        self.units = [stage.units[0] for stage in self.stages]
        self.unit = self.units[self.place.stage]
        chunks = max(len(stage.chunks) for stage in self.stages)
        self.path = [(s, c) for c in range(chunks) for s in range(len(self.stages))]
        self.rows = Rows(length)
        switches = [rope.switch for rope in spec.ropes if rope.switch is not None]
        self.switch = min(switches, default=None)  # longer rows are turned by the long factors, from their first token
        self.shards: list[int] = [0] * self.unit.tp  # tokens of the current call on each rank of the group
        self.model = self._build(weights, kernels)
        if self.works:
            self._connect()

    def _build(self, weights: WeightSource, kernels: KernelPlan) -> GPTStage:
        stage, spec = self.stages[self.place.stage], self.spec
        unit = stage.units[self.place.unit]
        shares_of_ranks = shares(spec, unit.tp_split)
        share = shares_of_ranks[self.place.tp_rank]
        stage_model = empty_stage(
            spec, stage, share, self.dtype, self.comm.device, kernels, self.plan.seq_length, without=weights.elsewhere
        )
        model, params = stage_model.module, stage_model.parameters()
        boxed_params = {
            name: (tensor, stage_model.boxes[name], params[name]) for name, tensor in stage_model.tensors.items()
        }
        self._fill = partial(weights.fill, boxed_params, stage_model.scales, self.world)
        self.group, self.vocab = self.comm.group(unit.ranks), share.vocab
        self._norms: RowNorms | None = None
        if spec.lora is not None and spec.lora.dora:
            self._norms = RowNorms(model, stage_model.tensors, spec, replace(stage, experts=()), self.comm)
        self.refresh()
        if unit.tp > 1:
            apply_tensor_parallel(model, self.group, self.shards, share.vocab, [s.kv_heads for s in shares_of_ranks])
            apply_expert_parallel(model, replace(stage, experts=()), self.comm)  # all ranks have columns of all experts
        apply_cache(model, self.rows)
        if stage.head:
            model.lm_head.register_forward_pre_hook(self._last_tokens)
        return model.requires_grad_(False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights as they are now. Called on all ranks."""
        self._fill()
        if self._norms is not None:
            self._norms.refresh()

    def drop_cache(self) -> None:
        """Give up the memory of what was generated."""
        drop_cache(self.model)

    def _last_tokens(self, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        """The head is only asked about the last token of every row: [b, t, h] -> [b, 1, h]."""
        (x,) = args
        if x.shape[1] == 1:
            return (x,)
        return (x[torch.arange(len(x), device=x.device), self.rows.filled - 1].unsqueeze(1),)

    def _connect(self) -> None:
        peers = {rank for unit in self.units for rank in unit.ranks} - {self.comm.rank}
        self.comm.connect(peers)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], first: int, new_tokens: int, sampling: Sampling,
        stops: Callable[[list[int]], bool] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Answers to some prompts, at most ``new_tokens`` each, up to and with a token of ``sampling.ends``.

        Args:
            prompts: one batch of this pipeline; ``first``: global index of its first one.
            stops: whether an answer has ended, of the ids of its prompt and itself.
        """
        rows = [PromptRow(first + i, prompt, [], new_tokens) for i, prompt in enumerate(prompts)]
        ended = [False] * len(rows)

        def ends(row: PromptRow) -> bool:
            token = row.answer[-1]
            return token in sampling.ends or len(row.answer) == new_tokens or (stops is not None and stops(row.ids))

        for bound in dict.fromkeys((self.switch, None)):
            unfinished = [i for i, row in enumerate(rows) if not ended[i] and (bound is None or len(row.ids) <= bound)]
            if unfinished:
                self.model.turn_for(bound or len(rows[unfinished[0]].ids), self.spec.head_dim)
                self._continue([rows[i] for i in unfinished], sampling, ends, bound)
                for i in unfinished:
                    ended[i] = bool(rows[i].answer) and ends(rows[i])
        return [list(row.answer) for row in rows]

    def _continue(
        self, rows: Sequence[PromptRow], sampling: Sampling, ends: Callable[[PromptRow], bool], bound: int | None
    ) -> None:
        """Answer until each row has ended, or has more than ``bound`` tokens; from an empty cache."""
        device = self.comm.device
        lengths = torch.tensor([len(row.ids) for row in rows])
        width = int(lengths.max())
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        for row_index, row in enumerate(rows):
            tokens[row_index, : len(row.ids)] = torch.tensor(row.ids)
        self.rows.begin(lengths.to(device))
        positions = torch.arange(width, device=device).expand(len(rows), width)
        unfinished, tokens = set(range(len(rows))), tokens.to(device)
        while True:
            logits = self._forward(tokens, positions)
            next_tokens = self._spread(sampling.choose(logits, rows) if logits is not None else None, len(rows))
            for row_index in sorted(unfinished):
                rows[row_index].answer.append(int(next_tokens[row_index]))
                if ends(rows[row_index]) or (bound is not None and len(rows[row_index].ids) > bound):
                    unfinished.discard(row_index)
            if not unfinished:
                return
            positions = self.rows.filled[:, None]
            self.rows.advance()
            tokens = next_tokens.to(device)[:, None]

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Logits [b, vocabulary] on the ranks of the head's group, None on others."""
        b, t = tokens.shape
        own_stage = self.place.stage
        self.shards[:] = [stop - start for start, stop in cut(t, [1] * self.unit.tp)]
        batch, out = _Batch(positions), tokens
        for step_index, (s, c) in enumerate(self.path):
            if s != own_stage or c >= len(self.stages[s].chunks):
                continue
            stage = self.stages[s]
            part = StagePart(range(*stage.chunks[c]), stage.embed and c == 0, stage.head and c + 1 == len(stage.chunks))
            sender_stage = self.path[step_index - 1][0] if step_index else own_stage
            if sender_stage != own_stage:
                out = self._receive(sender_stage, b)
            out = self.model(out, batch, part)
            receiver_stage = self.path[step_index + 1][0] if step_index + 1 < len(self.path) else own_stage
            if receiver_stage != own_stage:
                self._send(out, receiver_stage, t)
        if not self.stages[own_stage].head:
            return None
        return self._whole(out[:, -1])

    def _send(self, x: torch.Tensor, stage: int, t: int) -> None:
        """Hidden states to the group of the next stage: each of its ranks gets its tokens from one of this group."""
        next_unit = self.units[stage]
        all_tokens = gather_tokens(x, self.group, self.shards) if self.unit.tp > 1 else x
        for k, (start, stop) in enumerate(cut(t, [1] * next_unit.tp)):
            if stop > start and k % self.unit.tp == self.place.tp_rank:
                self.comm.isend(all_tokens[:, start:stop].contiguous(), next_unit.ranks[k], tag=0).wait()

    def _receive(self, stage: int, b: int) -> torch.Tensor:
        shape = (b, self.shards[self.place.tp_rank], self.spec.hidden_size)
        x = torch.empty(shape, dtype=self.dtype, device=self.comm.device)
        if x.numel():
            sender_unit = self.units[stage]
            self.comm.irecv(x, sender_unit.ranks[self.place.tp_rank % sender_unit.tp], tag=0).wait()
        return x

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[b, this rank's rows] -> [b, vocabulary], on every rank of the group."""
        if self.unit.tp == 1:
            return logits
        sizes = [b - a for a, b in (s.vocab for s in shares(self.spec, self.unit.tp_split))]
        part = logits.contiguous()
        parts = [part if i == self.group.index else part.new_empty(len(part), n) for i, n in enumerate(sizes)]
        self.group.exchange([part] * len(sizes), parts).wait()
        return torch.cat(parts, dim=-1)

    def _spread(self, chosen: torch.Tensor | None, b: int) -> torch.Tensor:
        """The chosen tokens [b], on all working ranks of the pipeline."""
        head = next(i for i, stage in enumerate(self.stages) if stage.head)
        source = self.units[head].ranks
        if chosen is None:
            chosen = torch.empty(b, dtype=torch.int64, device=self.comm.device)
            self.comm.irecv(chosen, source[0], tag=1).wait()
        elif self.comm.rank == source[0]:
            other_ranks = [rank for unit in self.units for rank in unit.ranks if rank not in source]
            for handle in [self.comm.isend(chosen, rank, tag=1) for rank in other_ranks]:
                handle.wait()
        return chosen.cpu()
