"""How a plan is computed, beyond what plan, model and dtype say. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.fields import stages
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.spec import Dropout
from hetero_megatron.spec.dropout import NO_DROPOUT
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.spec.moe import UNBALANCED, Balancing
from hetero_megatron.spec.preference import Preference
from hetero_megatron.training.config import RunConfig

if TYPE_CHECKING:
    from hetero_megatron.pipeline.stage_work import StepResult
    from hetero_megatron.pipeline.step_work import Fetch
    from hetero_megatron.spec.distillation import Distillation
    from hetero_megatron.spec.grpo import Grpo

    BeforeForward = Callable[[Fetch, int, int], StepResult | None]


@dataclass(frozen=True)
class RuntimeOptions:
    """Equal on all ranks.

    Attributes:
        compile_backend: of torch.compile, for the layers; None: they run as they are.
        logits_bytes: where the logits of a micro-batch would be more, head and loss go through its tokens in chunks.
        balancing: of experts, where the model has some.
        fp8: what the linear modules of layers compute in, where no stage says otherwise; None: in the weights' dtype.
        dropout: in training; seed: of its masks.
        graphs_after: optimizer steps after which layers run as device graphs (``cli/flags/training.py`` says where
            they can); None: they never do.
        preference, distillation, grpo: the loss, where it is not that of tokens alone.
        reduce_in_bf16: gradients are rounded to bf16 where they travel between ranks.
        fixed_order: gradients are added in the order of ranks on devices, too, not in their library's.
        narrow_tp_sums: 16-bit sums of tensor parallelism are the device library's, which rounds after every addition.
    """

    compile_backend: str | None = None
    logits_bytes: int = LOGITS_BYTES
    balancing: Balancing = UNBALANCED
    fp8: Fp8 | None = None
    dropout: Dropout = NO_DROPOUT
    seed: int = 0
    graphs_after: int | None = None
    preference: Preference | None = None
    distillation: Distillation | None = None
    reduce_in_bf16: bool = False
    grpo: Grpo | None = None
    fixed_order: bool = False
    narrow_tp_sums: bool = False

    @property
    def facts(self) -> tuple[str, ...]:
        """What a loss beside another model's says besides itself: names of means over what it counts."""
        if self.distillation is not None:
            from hetero_megatron.spec.distillation import FACTS

            return FACTS
        judged = self.preference or self.grpo
        return judged.facts if judged is not None else ()

    @staticmethod
    def of(config: RunConfig) -> RuntimeOptions:
        return RuntimeOptions(
            config.compile, config.logits_bytes, config.balancing, config.fp8, config.dropout, config.seed,
            config.graphs_after, config.preference, config.distillation, config.reduce_in_bf16, config.grpo,
            config.deterministic, config.distributed.narrow_tp_sums,
        )  # fmt: skip


PLAIN = RuntimeOptions()


def stages_fit(options: RuntimeOptions, plan: Plan) -> None:
    """UserError: what the run computes with is not known beside divided weights or activations in host memory."""
    for path, _, stage in stages(plan):
        if stage.weights is not None:
            _require_plain(options, f"{path}.weights", "weights cannot be divided")
        if stage.activations is not None:
            _require_plain(options, f"{path}.activations", "activations cannot be in host memory", fp8=True)


def _require_plain(options: RuntimeOptions, field: str, problem: str, fp8: bool = False) -> None:
    """Refuse what a stage with ``field`` cannot have; ``fp8``: that is not among it."""
    refused = (
        (options.compile_backend is not None, "compiled layers", "--compile"),
        (options.graphs_after is not None, "layers as device graphs", "--cuda-graph-impl"),
        (options.fp8 is not None and not fp8, "products in fp8", "--fp8-format"),
    )
    for is_used, feature, flag in refused:
        if is_used:
            accepted = f"a plan without it, or no {flag}"
            raise UserError(f"{problem} beside {feature}", field=field, value=flag, accepted=accepted)


@dataclass
class StepHooks:
    """What others want to be asked in a step.

    Attributes:
        before_update: called before weights change: waits for whoever still reads weights or moments.
        before_reading: called before anything but a layer's forward reads weights: waits for those that are under way.
        before_forward: called with what a step or an evaluation is to work on: lets another model speak first.
        facts: called in each step before it ends: what else there is to say of its batch, by name.
        before_commit: called before all ranks hear of each other that their gradients are complete.
        unwatched: context in which nothing is recorded of what the model does.
    """

    before_update: Callable[[], None] = lambda: None
    before_reading: Callable[[], None] = lambda: None
    before_forward: BeforeForward = lambda fetch, first_sample, batch_size: None
    facts: Callable[[], Mapping[str, float]] = dict
    before_commit: Callable[[], None] = lambda: None
    unwatched: Callable[[], AbstractContextManager[object]] = nullcontext
