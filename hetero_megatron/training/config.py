"""What a run does: frozen, complete, checked. Built from flags by ``cli.configure``; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_megatron.data import DataConfig
from hetero_megatron.plan import Plan
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.batch_size import BatchSize
from hetero_megatron.training.loss_scale import LossScale
from hetero_megatron.training.lr_schedule import LearningRate, WeightDecay

DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class ScheduleConfig:
    """Length of training and what changes on the way; all but ``train_iters`` are functions of samples.

    Attributes:
        train_iters: optimizer steps.
        train_samples: sequences of all steps; where the flags gave samples, the last step may end before them.
    """

    train_iters: int
    train_samples: int
    batch: BatchSize
    lr: LearningRate
    weight_decay: WeightDecay


@dataclass(frozen=True)
class OptimizerConfig:
    """``adam`` is AdamW. ``clip_grad`` 0: no clipping."""

    name: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9
    clip_grad: float = 1.0


@dataclass(frozen=True)
class PrecisionConfig:
    """``dtype`` of weights and activations (one of ``DTYPES``); the loss scale is 1 except for fp16."""

    dtype: str = "fp32"
    loss_scale: LossScale = LossScale()
    deterministic: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """``iters`` global batches after every ``interval`` steps (None: never); ``skip_train``: once, and nothing else."""

    interval: int | None = None
    iters: int = 100
    skip_train: bool = False


@dataclass(frozen=True)
class ExitConfig:
    """Stop after a step that is a multiple of ``interval``, after ``minutes``, or on a signal (its name)."""

    interval: int | None = None
    minutes: int | None = None
    signal: str | None = None


@dataclass(frozen=True)
class WandbConfig:
    """Arguments of ``wandb.init``."""

    project: str
    entity: str | None = None
    name: str | None = None
    directory: str | None = None

    def arguments(self) -> dict[str, str]:
        pairs = {"project": self.project, "entity": self.entity, "name": self.name, "dir": self.directory}
        return {key: value for key, value in pairs.items() if value is not None}


@dataclass(frozen=True)
class LoggingConfig:
    """``save``: directory for metrics.jsonl (None: not written). ``interval``: steps between console lines."""

    interval: int = 100
    save: str | None = None
    tensorboard_dir: str | None = None
    tensorboard_queue_size: int = 1000
    tensorboard_interval: int = 1
    validation_perplexity: bool = False
    wandb: WandbConfig | None = None


@dataclass(frozen=True)
class RuntimeConfig:
    """``timeout_minutes``: how long a rank waits for another; ``bucket_bytes`` of gradients (None: chosen)."""

    timeout_minutes: int = 10
    bucket_bytes: int | None = None


@dataclass(frozen=True)
class TrainConfig:
    """Everything about one run.

    Attributes:
        data: None in a dry run without data flags, never in training.
        notices: what was accepted without effect, and why; rank 0 prints them.
    """

    spec: ModelSpec
    plan: Plan
    seed: int
    schedule: ScheduleConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    evaluation: EvaluationConfig
    exit: ExitConfig
    logging: LoggingConfig
    runtime: RuntimeConfig
    data: DataConfig | None = None
    dry_run: bool = False
    notices: tuple[str, ...] = ()
