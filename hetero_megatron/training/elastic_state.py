"""What one rank of an elastic run does beside its steps: copies for its peers, leaving at a step's end, and
going on from what ranks have in their memories."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.comm import Comm, Group
from hetero_megatron.comm.epochs import EpochWatch
from hetero_megatron.training.checkpointing import Checkpointing, ConsumedSamples
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.exit import ExitConditions
from hetero_megatron.training.held_state import Held, HeldMoment, Moment, origins, owned_state, restore
from hetero_megatron.training.loop import Training
from hetero_megatron.training.lr_schedule import LossScale
from hetero_megatron.training.peer_replicas import PeerReplicas, hand_over
from hetero_megatron.training.runtime import Runtime

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


@dataclass
class Restored:
    """See :class:`~hetero_megatron.training.train.Resume`."""

    config: RunConfig
    exit: ExitConditions | None
    peak: float | None
    source: HeldMoment
    held: list[Held]
    comm: Comm
    all_ranks: Group
    moved: int = 0

    def load(self, checkpoints: Checkpointing, runtime: Runtime) -> tuple[RunConfig, ConsumedSamples, LossScale]:
        checkpoints.go_on()
        self.comm.activity = "moving the state"
        self.moved = restore(
            self.source, self.held, runtime.optimizer, self.config.compiled, self.all_ranks, runtime.outer
        )
        moment = self.source.moment
        loss_scale = self.config.loss_scale
        scale = loss_scale.with_state(moment.scale) if loss_scale.dynamic else loss_scale
        return self.config, ConsumedSamples(moment.step, moment.consumed), scale

    @property
    def islands(self) -> str:
        """What becomes of those that take outer steps, in words; empty: nothing changes."""
        outer, was = self.config.plan.outer, self.source.moment.outer
        if was is None or outer is None:
            ends = "; outer steps end, and training goes on from the global weights" if was is not None else ""
            return ends if outer is None else "; outer steps begin"
        goes_on = origins(self.source, outer)
        counts = {i: int(max(tokens[i] for tokens in was.tokens)) for i in range(len(was.tokens[0]))}
        texts = [f"island {i} is left out, with up to {n:,} tokens since its last exchange" for i, n in counts.items()
                 if i not in goes_on]  # fmt: skip
        texts += [f"island {i} begins from the global weights" for i, island in enumerate(goes_on) if island is None]
        texts += ["the exchange that was due is made by those who are there"] if was.due else []
        return "".join(f"; {text}" for text in texts)


class ElasticState:
    """Of one epoch, on a rank of its plan.

    Args:
        replicas: None: no copies are kept.
        peers: of the ranks to which this one gives what it owns when it leaves: the plan's, or those of its island.
        node: this rank's host, for choosing who takes over.
        watch: knows whether the launcher wants the job to stop, or this epoch to end.
        phases: told once the first step is done; None: nothing is to be told.

    Attributes:
        all_leave: the run stops here, and saves, because all ranks were told to leave.
    """

    def __init__(
        self, training: Training, replicas: PeerReplicas | None, peers: Group, node: str, watch: EpochWatch,
        phases: Phases | None,
    ) -> None:  # fmt: skip
        self.training, self.replicas, self.peers, self.node, self._watch = training, replicas, peers, node, watch
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
        if self.replicas is not None:
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
        outer, moment = self.training.runtime.outer, self.training.in_memory
        tensors, numbers = owned_state(self.optimizer, self.training.config.spec, outer)
        exchange = outer.moment() if outer is not None else None
        return Held(Moment(moment.step, moment.consumed, moment.loss_scale.state_dict(), numbers, exchange), tensors)

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
        if runtime.outer is not None:
            runtime.outer.settle()
        leaves = self.node in leaving
        if not leaving:
            raise HandOver(leaves, ())
        live_state = self._live()
        raise HandOver(leaves, hand_over(self.peers, self.node, live_state.moment, live_state.tensors, leaves))

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
        exchange = live_state.moment.outer
        form = self.optimizer.updates > 0, exchange is not None and exchange.under_way
        replicas.start(live_state.moment, live_state.tensors, form)

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
