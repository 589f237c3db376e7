"""What one rank of an elastic run does beside its steps: copies for its peers, and leaving at a step's end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.comm.epochs import EpochWatch
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.held_state import Held, Moment, owned_state
from hetero_megatron.training.loop import Training
from hetero_megatron.training.lr_schedule import LossScale
from hetero_megatron.training.peer_replicas import PeerReplicas, hand_over

STOP, LEAVE, PAUSE = "stop", "leave", "pause"


class HandOver(BaseException):
    """Raised on all ranks at the end of a step: the run goes on in another epoch. No error, and taken for none.

    Attributes:
        leaves: this rank is not in it.
        held: what others gave to this rank.
    """

    def __init__(self, leaves: bool, held: Sequence[Held]) -> None:
        super().__init__("the job goes on in another epoch")
        self.leaves, self.held = leaves, list(held)


@dataclass
class Phases:
    """What it took until this epoch's first step was done, by phase, in seconds; and what happened, after which step,
    and how many bytes moved."""

    text: str
    step: int
    seconds: dict[str, float]
    moved: int = 0


class ElasticState:
    """Of one epoch, on a rank of its plan.

    Args:
        replicas: None: no copies are kept.
        node: this rank's host, for choosing who takes over.
        watch: knows whether the launcher wants the job to stop, or this epoch to end.
        phases: told once the first step is done; None: nothing is to be told.

    Attributes:
        all_leave: the run stops here, and saves, because all ranks were told to leave.
    """

    def __init__(
        self, training: Training, replicas: PeerReplicas | None, node: str, watch: EpochWatch, phases: Phases | None
    ) -> None:
        self.training, self.replicas, self.node, self._watch = training, replicas, node, watch
        self.phases, self.begin = phases, time.perf_counter()
        optimizer = training.runtime.optimizer
        assert optimizer is not None
        self.all_leave = False
        self.optimizer = optimizer
        if replicas is not None:
            training.runtime.hooks.before_commit = replicas.wait

    @property
    def asks(self) -> bool:
        """Whether the launcher wants the job to stop, or this epoch to end, after a step."""
        return bool(self._watch.called_off) or self._watch.paused

    def first_copies(self) -> None:
        """Before the first step: then a loss during it costs nothing. Called on all ranks of the plan."""
        if self.replicas is not None and self.replicas.group.size > 1:
            self._copy()
            self.replicas.wait()
        self.training.runtime.world.gather_objects(True, bool)  # all have theirs: what was held before is not needed

    def after_step(self, training: Training, stop: bool, final: bool) -> bool:
        """Called on all ranks when a step is complete, and saved where that was due; ``final``: it is the run's last.

        Returns:
            whether the run ends here.

        Raises:
            HandOver: it goes on in another epoch.
        """
        self.tell()
        if stop and not final:
            self._stop(training)
        if stop or final:
            return True
        if self.replicas is not None and self.replicas.due(training.step):
            self._copy()
        return False

    def held(self) -> list[Held]:
        """What this rank has after it was torn from whatever it did: copies, and the live state."""
        copies = self.replicas.held() if self.replicas is not None else []
        return [*copies, self._live()]

    def _live(self) -> Held:
        """What this rank owns, in the optimizer's own memory."""
        tensors, numbers = owned_state(self.optimizer, self.training.config.spec)
        moment = self.training.in_memory
        return Held(Moment(moment.step, moment.consumed, moment.loss_scale.state_dict(), numbers), tensors)

    def _stop(self, training: Training) -> None:
        """Whether some leave or join, or all stop."""
        runtime = training.runtime
        runtime.comm.activity = "handing over"
        wishes_of_ranks = runtime.world.gather_objects((self.node, self._wish(training)), tuple[str, str])
        wishes = {wish for _, wish in wishes_of_ranks}
        leaving = {node for node, wish in wishes_of_ranks if wish == LEAVE}  # the next plan is without the whole node
        self.all_leave = STOP not in wishes and leaving == {node for node, _ in wishes_of_ranks}
        if STOP in wishes or not wishes & {LEAVE, PAUSE} or self.all_leave:
            return
        training.checkpoints.wait()
        if runtime.comm.accelerator is not None:
            runtime.comm.accelerator.synchronize()  # no group is left while something is under way in it
        leaves = self.node in leaving
        if not leaving:
            raise HandOver(leaves, ())
        live_state = self._live()
        raise HandOver(leaves, hand_over(runtime.world, self.node, live_state.moment, live_state.tensors, leaves))

    def _wish(self, training: Training) -> str:
        exit = training.exit
        if training.checkpoints.failed or self._watch.called_off or (exit.reason and not exit.leaves):
            return STOP
        return LEAVE if exit.reason else PAUSE if self._watch.paused else ""

    def _copy(self) -> None:
        training, replicas = self.training, self.replicas
        assert replicas is not None
        training.runtime.comm.activity = "copying the optimizer's state to a peer"
        live_state = self._live()
        replicas.start(live_state.moment, live_state.tensors, self.optimizer.updates > 0)

    def tell(self) -> None:
        """Once: how this epoch began, when its first step is done, or where it has none to do."""
        phases, self.phases = self.phases, None
        if phases is None:
            return
        if self.training.step > phases.step:
            phases.seconds["first step"] = time.perf_counter() - self.begin
        times_text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.seconds.items())
        text = f"{phases.text}: {times_text}; {phases.moved / 1e6:.1f} MB moved"
        reporter = self.training.reporter
        reporter.say(f"elastic: {text}")
        reporter.event("elastic", text, step=phases.step, seconds=phases.seconds, bytes=phases.moved)


def scale_at(config: RunConfig, moment: Moment) -> LossScale:
    """The loss scale of the step after ``moment``."""
    return config.loss_scale.with_state(moment.scale) if config.loss_scale.dynamic else config.loss_scale

