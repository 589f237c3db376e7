"""A run of decoder layers, with the embedding before or the head after it: one definition for all families.

It reads and runs like a single-device model. ``Share`` says how many heads, columns and rows this copy has;
tensor parallelism and recomputation are applied from outside (``parallel/``). Parameters carry the logical
names of ``spec/tensors.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn

from hetero_megatron.model.latent_attention import LatentAttention
from hetero_megatron.model.layers import (
    Attention,
    Context,
    Linear,
    Norm,
    activation_of,
    joint_products,
    lay_together,
)
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.ops import Angles, KernelPlan, default_kernels, rope_frequencies, rope_tables, softcap
from hetero_megatron.ops.dropout import AFTER_ATTENTION, AFTER_MLP, EMBEDDING, Draws
from hetero_megatron.spec import Dropout, LayerKind, ModelSpec, Rope, Share
from hetero_megatron.spec.dropout import NO_DROPOUT


class TokensAhead(Protocol):
    """Of a micro-batch, as many tokens ahead as its place in ``StageBatch.ahead`` says."""

    tokens: torch.Tensor  # [b, s] int64
    mask: torch.Tensor  # [b, s] bool, which positions have a target


class StageBatch(Protocol):
    """What the model needs to know about a micro-batch besides its tokens."""

    positions: torch.Tensor  # [b, s] int64
    documents: Sequence[Sequence[int]] | None  # document starts per row
    loss_mask: torch.Tensor | None  # [b, s] bool, which tokens count in the loss; None: all
    draws: Draws | None  # of dropout; None: there is none, as in evaluation and generation
    ahead: Sequence[TokensAhead]  # what modules predict further tokens from, in order; none: they do not run


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec, columns: int, kernels: KernelPlan) -> None:
        super().__init__()
        h, f = spec.hidden_size, columns
        self.activate = activation_of(spec, kernels)
        self.gate_proj = Linear(h, f, bias=spec.mlp_bias, kernels=kernels) if spec.gated else None
        self.up_proj = Linear(h, f, bias=spec.mlp_bias, kernels=kernels)
        columns_of_x = (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)
        self.together = lay_together(*columns_of_x)
        self.down_proj = Linear(f, h, bias=spec.mlp_bias, kernels=kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h] -> [b, s, h]; of a TP rank, a partial sum over its columns until ``down_proj`` adds them up."""
        return cast(torch.Tensor, self.down_proj(self.activate(*joint_products(self.together, x))))


def _mlp(spec: ModelSpec, kind: LayerKind, share: Share, kernels: KernelPlan) -> nn.Module | None:
    if kind.mlp == "none":
        return None
    if kind.mlp == "dense":
        return MLP(spec, share.ffn[1] - share.ffn[0], kernels)
    assert spec.moe is not None
    shared = MLP(spec, share.shared_ffn[1] - share.shared_ffn[0], kernels) if spec.moe.shared_ffn else None
    return MoEMLP(spec, share, kernels, shared)


class ResidualStream(NamedTuple):
    """The residual stream after a layer, both [b, s, h]: ``x``, and what its MLP adds. The next norm makes the sum
    as it reads them."""

    x: torch.Tensor
    added: torch.Tensor

    def sum(self) -> torch.Tensor:
        """[b, s, h]."""
        return self.x + self.added


class Layer(nn.Module):
    """A decoder layer: attention and MLP, each with a norm before it, after it or both, added to the residual stream,
    one after the other or both at once (``ModelSpec.parallel_block``); or one of the two alone, behind one norm.

    The norms have the names of ``spec/tensors.py``; ``before`` and ``after`` say what they are for. Where
    ``takes_sum``, the layer takes x and ``added`` of the layer before it, and elsewhere their sum. ``number``: of the
    layer in the model.
    """

    def __init__(
        self, spec: ModelSpec, number: int, share: Share, kernels: KernelPlan, dropout: Dropout = NO_DROPOUT
    ) -> None:
        super().__init__()
        self.residual_scale, self.kernels = spec.residual_scale, kernels
        self.number, self.dropout = number, dropout.hidden
        norm = partial(Norm, spec, spec.hidden_size, kernels)
        if spec.norm_placement != "post":
            self.input_layernorm = norm()
        self.kind = spec.layer(number)
        if self.kind.linear:
            from hetero_megatron.model.linear_mixer import linear_mixer

            self.linear_attn = linear_mixer(spec)(spec, share, kernels)
        elif self.kind.mixer == "attention":
            attention = Attention if spec.mla is None else LatentAttention
            self.self_attn = attention(spec, number, share, kernels, dropout.attention)
        self.parallel = spec.parallel_block is not None
        if spec.parallel_block != "one_norm" and not self.kind.single:
            self.post_attention_layernorm = norm()
        if spec.norm_placement == "pre_post":
            self.pre_feedforward_layernorm = norm()
        self.mlp = _mlp(spec, self.kind, share, kernels)
        if spec.norm_placement != "pre":
            self.post_feedforward_layernorm = norm()
        names: dict[str, tuple[str | None, ...]] = {
            "pre": ("input_layernorm", None, "post_attention_layernorm", None),
            "pre_post": (
                "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
            "one_norm": ("input_layernorm", None, None, None),
        }  # fmt: skip
        one_norm = self.kind.single or spec.parallel_block == "one_norm"
        self._names = names["one_norm" if one_norm else spec.norm_placement]
        self.takes_sum = self._names[0] is not None

    def norms(self) -> tuple[Norm | None, ...]:
        """Before attention (of a layer of one block, before that), after it, before the MLP, after it."""
        return tuple(None if name is None else getattr(self, name) for name in self._names)

    @property
    def mixer(self) -> nn.Module | None:
        """Where tokens meet: attention, or linear attention; both have a ``core_attention`` and an ``o_proj``."""
        return self.linear_attn if self.kind.linear else getattr(self, "self_attn", None)

    def forward(self, x: torch.Tensor, context: Context, added: torch.Tensor | None = None) -> ResidualStream:
        """x, added: [b, s, h]; between the blocks, of a TP rank's own tokens."""
        before_attention, after_attention, before_mlp, after_mlp = self.norms()
        if before_attention is None:
            y = x
        elif added is None:
            y = before_attention(x)
        else:
            y, x = before_attention(added, x)
        if self.mixer is None:
            return ResidualStream(x, self._added(self._fed_forward(y, context), after_mlp, AFTER_MLP, context))
        inputs = y
        y = self._added(self.mixer(y, context), after_attention, AFTER_ATTENTION, context)
        if self.mlp is None:
            return ResidualStream(x, y)
        if self.parallel:
            inputs = inputs if before_mlp is None else before_mlp(x)
            return ResidualStream(x, y + self._added(self._fed_forward(inputs, context), after_mlp, AFTER_MLP, context))
        if before_mlp is not None:
            y, x = before_mlp(y, x)
        else:
            y = x = x + y
        return ResidualStream(x, self._added(self._fed_forward(y, context), after_mlp, AFTER_MLP, context))

    def _fed_forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]."""
        mlp = cast(nn.Module, self.mlp)
        return cast(torch.Tensor, mlp(x, context.counted) if isinstance(mlp, MoEMLP) else mlp(x))

    def _added(self, y: torch.Tensor, norm: Norm | None, site: int, context: Context) -> torch.Tensor:
        """What a block adds to the residual stream, [b, s, h]."""
        y = y if norm is None else norm(y)
        y = y if self.residual_scale == 1.0 else y * self.residual_scale
        return context.drop(y, self.kernels, self.dropout, self.number, site)


class Head(nn.Module):
    """Logits of this share's vocabulary rows; holds no matrix where the embedding is tied.

    ``in_loss``: the loss multiplies by ``matrix`` itself, so that logits never exist as a whole: the head passes its
    input on.
    """

    def __init__(
        self, spec: ModelSpec, weight: nn.Parameter | None, rows: int, width: int, kernels: KernelPlan
    ) -> None:
        super().__init__()
        self.kernels, self.softcap, self.in_loss = kernels, spec.logit_softcap, False
        if weight is None:
            self.weight = nn.Parameter(torch.empty(rows, width))
        self.bias = nn.Parameter(torch.empty(rows)) if spec.head_bias else None
        self._tied = [weight] if weight is not None else []  # a list hides it from named_parameters

    @property
    def matrix(self) -> torch.Tensor:
        """[rows, width], its own or the embedding's."""
        return self._tied[0] if self._tied else self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h] -> logits [b, s, V_local], or x where the loss has the product."""
        if self.in_loss:
            return x
        logits: torch.Tensor = self.kernels.gemm(x, self.matrix, self.bias)
        return logits if self.softcap is None else softcap(logits, self.softcap)


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices: [b, s] int64 -> [b, s, width]."""
        return nn.functional.embedding(indices, self.weight)


@dataclass(frozen=True)
class StagePart:
    """A part of a stage that a micro-batch passes at once: some of its layers, with its embedding or head or not."""

    layers: Sequence[int]
    embed: bool
    head: bool


class GPTStage(nn.Module):
    """Layers ``layers`` of a model, with embedding and head where asked.

    Args:
        share: this copy's part of heads, feed-forward columns and vocabulary rows.
        layers: global indices of its decoder layers, ascending.
        kernels: which provider serves which operator; None: the default ones for ``dtype`` and ``device``.
        seq_length: of the run, which decides between the short and long factors of ``longrope``.
        dropout: of training: of batches with ``draws``.
        store: called with each layer when it is made, to give its weights another form before there are all.

    ``forward(x, batch)`` maps tokens [b, s] (with ``embed``) or hidden states [b, s, h] to hidden states, or
    (with ``head``) to logits [b, s, vocabulary share]; with a ``part``, only that of it. Parameters are left
    uninitialised. ``token_numbers``: which tokens of each sequence a batch has, [s] int64, where not the first ones.
    """

    def __init__(
        self,
        spec: ModelSpec,
        share: Share,
        layers: Sequence[int],
        embed: bool,
        head: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kernels: KernelPlan | None = None,
        seq_length: int = 0,
        dropout: Dropout = NO_DROPOUT,
        store: Callable[[Layer], object] = lambda layer: None,
    ) -> None:
        super().__init__()
        self.kernels = kernels = kernels or default_kernels(spec, share, head, dtype, device, dropout=dropout)
        self.dropout, self.token_numbers = dropout.hidden, cast(torch.Tensor | None, None)
        self.has_embed, self.has_head, self.numbers = embed, head, tuple(layers)
        self.own_tokens: Callable[[torch.Tensor], torch.Tensor] = lambda x: x  # [b, s] -> those between its blocks
        # As the dtype of the weights has it: Gemma was trained with that number.
        self.embed_scale, self.logit_scale = torch.tensor(spec.embed_scale, dtype=dtype).item(), spec.logit_scale
        # On the device from the start (no parameter or buffer: no checkpoint holds it): a copy in each forward
        # would make the host wait for all that the device has queued.
        # A stage without layers has them too: calibration takes what an action costs besides its layers to be alike.
        numbers = (*(layers or range(spec.num_layers)), *(spec.predictions if head else ()))
        ropes = dict.fromkeys(spec.layer(i).rope for i in numbers)
        self._freqs = {rope: torch.empty(0) for rope in ropes if rope is not None}
        self._angles: dict[Rope, Angles] = {}
        self._place = (seq_length, device)
        self.turn_for(seq_length, spec.head_dim)
        rows, h = share.vocab[1] - share.vocab[0], spec.hidden_size
        with _default_dtype(dtype), torch.device(device):
            self.model = nn.ModuleDict()
            if embed or (head and spec.embeds_last):
                self.model["embed_tokens"] = Embedding(rows, h)
            if embed and spec.position == "learned":
                self.model["embed_positions"] = Embedding(spec.max_position_embeddings, h)
            layer_modules = self.model["layers"] = nn.ModuleDict()
            for i in layers:
                layer_modules[str(i)] = layer = Layer(spec, i, share, kernels, dropout)
                store(layer)
            if head:
                self.model["norm"] = Norm(spec, h, kernels)
                tied = cast(Embedding, self.model["embed_tokens"]).weight if spec.tied else None
                self.lm_head = Head(spec, tied, rows, h, kernels)
            self.predictions = list[int]()
            if head and spec.mtp_layers:
                from hetero_megatron.model.prediction import make_prediction

                self.predictions = list(spec.predictions)
                for i in self.predictions:
                    layer_modules[str(i)] = layer = Layer(spec, i, share, kernels, dropout)
                    make_prediction(layer, spec, kernels)

    def turn_for(self, length: int, head_dim: int) -> None:
        """Take the rotary frequencies of sequences of ``length`` tokens."""
        positions, device = self._place
        for rope in self._freqs:
            freqs = rope_frequencies(rope, head_dim, rope.is_long(length))
            if torch.device(device).type in _HOST:
                self._freqs[rope] = freqs.to(device)
            else:
                self._angles[rope] = Angles(freqs, positions, device)

    def layers(self) -> Iterable[Layer]:
        """Those of modules that predict further tokens come last."""
        return cast(Iterable[Layer], cast(nn.ModuleDict, self.model["layers"]).values())

    def forward(self, x: torch.Tensor, batch: StageBatch, part: StagePart | None = None) -> torch.Tensor:
        """x: [b, s] int64 or [b, s, h] -> [b, s, h] or logits [b, s, V_local], of a batch with tokens ahead
        [(1 + modules) b, s, V_local]; see the class."""
        numbers = self.numbers if part is None else part.layers
        layers = [self.model["layers"][str(i)] for i in numbers]  # type: ignore[index]
        embedded = self.has_embed and (part is None or part.embed)
        if embedded:
            x = self.embed(x)
            if "embed_positions" in self.model:
                x = x + self.model["embed_positions"](batch.positions)
        counted = None if batch.loss_mask is None else self.own_tokens(batch.loss_mask)
        ropes, draws = self._rope_tables(batch.positions, x.dtype), batch.draws
        token_numbers = None if draws is None else self._tokens(batch)
        tokens = None if token_numbers is None else self.own_tokens(token_numbers[None])[0]
        context = Context(batch.documents, ropes, counted, batch.positions, draws, tokens, token_numbers)
        if embedded:
            x = context.drop(x, self.kernels, self.dropout, 0, EMBEDDING)
        stream: ResidualStream | None = None
        for layer in layers:
            if stream is not None and layer.takes_sum:
                stream = layer(stream.x, context, stream.added)
            else:
                stream = layer(x if stream is None else stream.sum(), context)
        x = x if stream is None else stream.sum()
        if not (self.has_head and (part is None or part.head)):
            return x
        x = self.model["norm"](x)
        if self.predictions and batch.ahead:
            x = self._with_predictions(x, batch, context)
        # The logits are scaled through the head's input, however head and loss are computed.
        return self.lm_head(x if self.logit_scale == 1.0 else x * self.logit_scale)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s] int64 -> [b, s, h], without positions; of a TP rank's own tokens."""
        x = cast(torch.Tensor, self.model["embed_tokens"](tokens))
        return x if self.embed_scale == 1.0 else x * self.embed_scale

    def _with_predictions(self, x: torch.Tensor, batch: StageBatch, context: Context) -> torch.Tensor:
        """x: [b, s, h] -> [(1 + modules) b, s, h]: what each module puts out, after it. All go through the head at
        once, as further rows."""
        outputs = [x]
        for number, tokens_ahead in zip(self.predictions, batch.ahead, strict=True):
            embedded = context.drop(self.embed(tokens_ahead.tokens), self.kernels, self.dropout, number, EMBEDDING)
            module_context = replace(context, counted=self.own_tokens(tokens_ahead.mask))
            outputs.append(self.model["layers"][str(number)](outputs[-1], module_context, embedded))  # type: ignore[index]
        return torch.cat(outputs)

    def _tokens(self, batch: StageBatch) -> torch.Tensor:
        """Numbers of a batch's tokens in their sequence: [s] int64."""
        length, numbers = batch.positions.shape[1], self.token_numbers
        numbers = torch.arange(length, device=batch.positions.device) if numbers is None else numbers
        assert len(numbers) == length, f"{len(numbers)} token numbers for {length} tokens"
        return numbers

    def _rope_tables(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> dict[Rope, tuple[torch.Tensor, torch.Tensor]]:
        """positions: [b, s] int64 -> cosines and sines, [b, s, d / 2] each, of each kind of rotary embedding."""
        if self._angles:
            return {rope: a.tables(positions, dtype, rope.attention_factor) for rope, a in self._angles.items()}
        return {rope: rope_tables(positions, f, dtype, rope.attention_factor) for rope, f in self._freqs.items()}


_HOST = ("cpu", "meta")  # where fp64 costs no more than it should


class _default_dtype:
    """Parameters created inside get this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
