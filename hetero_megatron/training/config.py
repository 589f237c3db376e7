"""What a run does: frozen, complete, checked. Built from flags by ``cli.configure``; no torch.

Read by ``training/train.py`` and what it builds, and by dry runs; nothing below training sees it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.data import DataConfig
from hetero_megatron.plans import Plan
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.spec import Dropout, ModelSpec
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.spec.moe import UNBALANCED, Balancing
from hetero_megatron.spec.preference import Preference
from hetero_megatron.training.lr_schedule import BatchSize, LearningRate, LossScale, WeightDecay

if TYPE_CHECKING:
    from hetero_megatron.plans.forward_only import ForwardRole
    from hetero_megatron.spec.distillation import Distillation
    from hetero_megatron.spec.grpo import Grpo
    from hetero_megatron.spec.muon import MuonRates


@dataclass(frozen=True)
class OptimizerConfig:
    """``adam`` is AdamW. ``clip_grad`` 0: no clipping. ``muon``: of matrices where ``name`` is ``muon``, whose AdamW of
    all others has ``beta1``, ``beta2`` and ``eps``."""

    name: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9
    clip_grad: float = 1.0
    muon: MuonRates | None = None

    def rates(self) -> dict[str, float]:
        """By flag, what may be another when a run goes on."""
        adam = {"--adam-beta1": self.beta1, "--adam-beta2": self.beta2, "--adam-eps": self.eps}
        if self.muon is not None:
            adam |= {
                "--muon-momentum": self.muon.momentum, "--muon-num-ns-steps": self.muon.steps,
                "--muon-extra-scale-factor": self.muon.extra_scale,
            }  # fmt: skip
        return ({"--sgd-momentum": self.momentum} if self.name == "sgd" else adam) | {"--clip-grad": self.clip_grad}


@dataclass(frozen=True)
class EvaluationConfig:
    """``iterations`` global batches after every ``interval`` steps and at the end; 0 iterations: never."""

    iterations: int = 0
    interval: int = 1


@dataclass(frozen=True)
class ExitConfig:
    """Stop after a step that is a multiple of ``interval``, after ``minutes``, on a signal (its name), or once ``file``
    appears on some rank's host."""

    minutes: int | None = None
    interval: int | None = None
    signal: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class ProfileSteps:
    """Steps ``start`` to ``end - 1``, counted from 0 as in Megatron: the first one profiled is step ``start + 1``.

    ``torch_ranks``: whose torch profiler output is written; empty: nobody's.
    """

    start: int
    end: int
    torch_ranks: tuple[int, ...] = ()

    def covers(self, step: int) -> bool:
        """Whether the step with this number, counted from 1, is profiled."""
        return self.start < step <= self.end


@dataclass(frozen=True)
class LoggingConfig:
    """``save``: directory for metrics.jsonl (None: not written). ``interval``: steps between console lines.

    ``wandb``, ``mlflow``: arguments of ``monitoring.boards``; None: off. ``validation_perplexity``: of evaluations, for
    dashboards. ``kernel_plan``: each stage's kernels are printed with what was passed over and why. ``log_format``: of
    the console line, ``short`` or ``megatron``. ``profile``: None: off. ``routing_stats``: file for how often experts
    were chosen. ``memory_snapshot``: file for the history of each rank's memory, with its number; None: not recorded.
    """

    interval: int = 100
    save: str | None = None
    tensorboard_dir: str | None = None
    tensorboard_queue_size: int = 1000
    tensorboard_interval: int = 1
    validation_perplexity: bool = False
    wandb: Mapping[str, Any] | None = None
    kernel_plan: bool = False
    log_format: str = "short"
    profile: ProfileSteps | None = None
    routing_stats: str | None = None
    mlflow: Mapping[str, Any] | None = None
    memory_snapshot: str | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints are written and read; None: nowhere.

    Attributes:
        overwrite: a ``save`` that holds checkpoints of another run is no reason to refuse.
        save_interval: steps between them (None: only when training ends or is stopped; 0: never).
        keep: how many stay (0: all); multiples of ``retain_interval`` steps stay as well.
        asynchronous: training goes on while one is written.
        step: which one is read; None: the latest.
        finetune: only the weights are read, and training starts at step 0.
        pretrained: read as with ``finetune`` where ``load`` holds no checkpoint.
        previous_on_corruption: take the newest good one before a damaged one.
        required: a ``load`` without checkpoints is refused.
        schedule_from: ``flags`` or ``checkpoint``: whose learning rate counts; ``same``: refused where they differ.
    """

    save: str | None = None
    overwrite: bool = False
    save_interval: int | None = None
    keep: int = 0
    retain_interval: int | None = None
    save_optim: bool = True
    asynchronous: bool = True
    load: str | None = None
    step: int | None = None
    finetune: bool = False
    pretrained: str | None = None
    load_optim: bool = True
    previous_on_corruption: bool = False
    required: bool = False
    schedule_from: str = "same"

    @property
    def goes_on(self) -> bool:
        """Whether what ``save`` holds is what the run begins with."""
        if self.save is None or self.load is None or self.finetune:
            return False
        return os.path.realpath(self.load) == os.path.realpath(self.save)


@dataclass(frozen=True)
class AdapterConfig:
    """Directories in PEFT's form: ``load``: the first values; ``save``: written at the end. ``merge``: what --save-hf
    writes is the base with the adapters merged into it."""

    load: str | None = None
    save: str | None = None
    merge: bool = False


@dataclass(frozen=True)
class AlignmentConfig:
    """What to write down for comparing platforms, in the first ``steps`` steps.

    ``dump``, ``capture``: directories; ``check``: operators to compare with fp64 (``all``), None: none; ``layers``:
    parts of module names, empty: everywhere.
    """

    dump: str | None = None
    capture: str | None = None
    check: tuple[str, ...] | None = None
    layers: tuple[str, ...] = ()
    steps: int = 1

    @property
    def asked(self) -> bool:
        return self.dump is not None or self.capture is not None or self.check is not None


@dataclass(frozen=True)
class FailureConfig:
    """What is watched for: ``check_spikes`` of the loss; ``rerun``: a step that is right the second time counts;
    ``stragglers``: ranks that fall behind are named; ``replan_on_drift``: where one computes more than this many times
    as long as it should, the run stops for its launcher to plan again; None: never; ``check_kernels``: at start, each
    against its definition; ``replica_interval``: steps between comparisons of copies of weights; None: never."""

    check_spikes: bool = False
    rerun: bool = False
    stragglers: bool = False
    replan_on_drift: float | None = None
    check_kernels: bool = True
    replica_interval: int | None = None


@dataclass(frozen=True)
class ElasticConfig:
    """``replicas_every``: steps between copies of states in another rank's memory (None: never); ``room``: for them."""

    replicas_every: int | None = 1
    room: Mapping[str, int] | None = None


@dataclass(frozen=True)
class DistributedConfig:
    """``backend``: of torch.distributed (None: the device's own); ``timeout_minutes``: how long a rank waits;
    ``transport``: between chips of unlike vendors (``comm/islands.py``); ``overlap_param_gather``: with the forward;
    ``narrow_tp_sums``: 16-bit sums of tensor parallelism are the device library's, rounded after every addition."""

    backend: str | None = None
    timeout_minutes: float = 10.0
    transport: str = "auto"
    overlap_param_gather: bool = False
    narrow_tp_sums: bool = False


@dataclass(frozen=True)
class RoleConfig:
    """A model that only runs forward beside the one that is trained: the name of its role (``plans.roles.ROLES``), its
    directory, what it is, and of a teacher on ranks of its own how many likeliest tokens of a position travel."""

    name: str
    hf: str
    spec: ModelSpec
    top_k: int = 0

    @property
    def flag(self) -> str:
        """That names the directory."""
        return f"--{self.name}-hf"


@dataclass(frozen=True)
class ScoreConfig:
    """What a model says of the data is written to ``path``, and nothing trained: of each position the ``top_k``
    likeliest tokens at ``temperature``."""

    path: str
    top_k: int
    temperature: float


@dataclass(frozen=True)
class ScheduleConfig:
    """Length of training and what changes on the way, as functions of consumed samples.

    Attributes:
        steps: optimizer steps.
        train_samples: sequences of all steps together.
        asked_samples: where the length was given in samples (``train_samples`` are those of whole steps).
    """

    steps: int
    train_samples: int
    batch_size: BatchSize
    learning_rate: LearningRate
    weight_decay: WeightDecay
    asked_samples: int | None = None

    def resumed(self, step: int, consumed: int) -> ScheduleConfig:
        """The schedule of a run that goes on after ``step`` steps and ``consumed`` samples, which were of another size
        perhaps: a length in samples stays one in samples, a length in steps one in steps."""
        if self.asked_samples is None:
            return self
        steps, samples = self.batch_size.steps_for(self.asked_samples, consumed)
        return replace(self, steps=step + steps, train_samples=samples)


@dataclass(frozen=True)
class RunConfig:
    """Everything about one run.

    Attributes:
        data: None in a dry run without data flags, never in training.
        dtype: of weights and activations: fp32, bf16, fp16 or fp64.
        fp8: what the linear modules of layers compute in, where no stage says otherwise; None: ``dtype``.
        loss_scale: constant 1 except for fp16.
        check_nan: end the run at the first loss or gradient (but of fp16) that is not finite; else skip the step.
        reduce_in_bf16: gradients are rounded to bf16 where they travel between ranks.
        deterministic: refuse operators that do not give the same bits every time.
        platform: name of the platform to run on; None: the one that is here.
        compile, graphs_after: backend of torch.compile, and steps after which layers are device graphs; None: neither.
        logits_bytes: where the logits of a micro-batch on a rank would be more, head and loss go through it in chunks.
        balancing: of the experts, where the model has some. elastic: None: the job ends when a rank does.
        as_rank: with ``dry_run``: the rank of the plan to run alone, with fake tensors; None: only print the plan.
        load_hf: directory whose safetensors are the initial weights; None: drawn from ``seed``.
        model_directory: the Hugging Face directory that --model names; what is in it besides weights travels along.
        save_hf: where the weights go at the end, as a Hugging Face directory; None: nowhere.
        save_hf_dtype: of its tensors; None: of each that which it had where it came from, of new ones ``dtype``.
        skip_train: evaluate once, and nothing else. allow_over_memory: take ranks that need more than their chip has.
        notices: what was accepted without effect, and why. preference: the loss of pairs; None: that of tokens.
        reference_hf: directory whose safetensors are the reference's weights; None: those that the run begins with.
        reference_logps: file of the reference's log-probabilities, written unless it is there; None: not in a file.
        distillation: the loss beside a teacher; None: there is none. It runs (``role``), or its scores are in a file
            (``teacher_scores``, of the model in ``teacher_hf``, None: of any).
        role: a second model that only runs forward, on ranks of its own or on the same ones.
        scores: what a run writes that trains nothing.
        grpo: each step learns from answers that are sampled for it; None: from the data.
    """

    spec: ModelSpec
    plan: Plan
    schedule: ScheduleConfig
    data: DataConfig | None = None
    cluster: Cluster | None = None
    seed: int = 1234
    dtype: str = "fp32"
    fp8: Fp8 | None = None
    loss_scale: LossScale = LossScale()
    dropout: Dropout = Dropout()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    exit: ExitConfig = ExitConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    adapter: AdapterConfig = AdapterConfig()
    failure: FailureConfig = FailureConfig()
    elastic: ElasticConfig | None = None
    logging: LoggingConfig = LoggingConfig()
    distributed: DistributedConfig = DistributedConfig()
    check_nan: bool = True
    reduce_in_bf16: bool = False
    deterministic: bool = False
    logits_bytes: int = LOGITS_BYTES
    balancing: Balancing = UNBALANCED
    alignment: AlignmentConfig = AlignmentConfig()
    platform: str | None = None
    compile: str | None = None
    graphs_after: int | None = None
    skip_train: bool = False
    load_hf: str | None = None
    model_directory: str | None = None
    save_hf: str | None = None
    save_hf_dtype: str | None = None
    dry_run: bool = False
    as_rank: int | None = None
    allow_over_memory: bool = False
    notices: tuple[str, ...] = ()
    preference: Preference | None = None
    reference_logps: str | None = None
    reference_hf: str | None = None
    distillation: Distillation | None = None
    role: RoleConfig | None = None
    teacher_scores: str | None = None
    teacher_hf: str | None = None
    scores: ScoreConfig | None = None
    grpo: Grpo | None = None

    @cached_property
    def compiled(self) -> CompiledPlan:
        """The plan for the model, compiled once for all that this process does with it."""
        pairs, muon = self.preference is not None, self.optimizer.name == "muon"
        return CompiledPlan(self.plan, self.spec, pairs=pairs, muon=muon)

    @cached_property
    def forward_role(self) -> ForwardRole | None:
        """``role`` with its plan, on its own ranks or on the same ones."""
        if self.role is None:
            return None
        from hetero_megatron.plans.forward_only import role_of

        forwards = 2 if self.preference is not None and self.preference.estimates_kl else 1
        return role_of(self.plan, self.spec, self.role.name, self.role.spec, self.role.top_k, self.cluster, forwards)

    @property
    def compiled_role(self) -> CompiledPlan:
        """Its plan, where there is one."""
        assert self.forward_role is not None
        return self.forward_role.compiled

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of the run, for ``Comm.create_groups``."""
        own_groups = self.compiled.groups
        of_role = () if self.role is None else self.compiled_role.forward_groups
        return (*own_groups, *sorted(set(of_role) - set(own_groups)))

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @property
    def train_samples(self) -> int:
        return self.schedule.train_samples

    @property
    def batch_size(self) -> BatchSize:
        return self.schedule.batch_size

    @property
    def learning_rate(self) -> LearningRate:
        return self.schedule.learning_rate

    @property
    def weight_decay(self) -> WeightDecay:
        return self.schedule.weight_decay
