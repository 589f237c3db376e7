"""The side of the ranks that train beside a generator, which samples answers on ranks of its own: when it gets weights,
which answers it is asked for, and how old the weights are that sampled them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hetero_megatron.comm import Comm, Group
from hetero_megatron.data import Datasets
from hetero_megatron.data.prompts import Prompts
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.training.answers import ends_of_answers
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.role_client import RoleMeetings, corpora
from hetero_megatron.training.role_messages import Instruction, RolloutRequest, Sampled, meeting_group
from hetero_megatron.training.weight_transfer import WeightTransfer

if TYPE_CHECKING:
    from hetero_megatron.training.loop import Training
    from hetero_megatron.training.runtime import Runtime


class GeneratorClient(RoleMeetings):
    """Has the generator sample, as :class:`~hetero_megatron.training.answers.Sampler`; made on all ranks that train.

    Args:
        size: answers of a step.
        steps: of the run.
    """

    def __init__(
        self, comm: Comm, meeting: Group | None, world: Group, g: Grpo, transfer: WeightTransfer, size: int, steps: int
    ) -> None:
        super().__init__(comm, meeting, world, GENERATOR)
        self._grpo, self._transfer, self._size, self._steps = g, transfer, size, steps
        self._done: Callable[[], int] = lambda: 0
        self._runtime: Runtime | None = None
        self._held: int | None = None  # steps that the generator's weights have seen; None: it has none
        self._asked: RolloutRequest | None = None  # what it works on
        self._used: RolloutRequest | None = None  # what is learned from

    def begin(self, training: Training) -> None:
        """See :class:`RoleMeetings`; the generator waits for its weights."""
        self._stop = training.exit.ask
        self.follow(training.runtime, lambda: training.step)
        marks = prompt_marks(training.config, training.node_data.datasets)
        self._same_data(self._meet(Instruction()), marks)

    def follow(self, runtime: Runtime, done: Callable[[], int]) -> None:
        """The weights are those of ``runtime``, after ``done()`` steps."""
        self._runtime, self._done = runtime, done

    def sample(self, prompts: Sequence[Sequence[int]], first: int) -> Sampled:
        """See :class:`~hetero_megatron.training.answers.Sampler`; the generator reads the prompts for itself."""
        if self._asked is None or self._asked.first != first:
            request = self._request(first)
            self._meet(Instruction(request))
            self._send(request)
            self._asked = request
        following = self._following(first)
        answer = self._meet(Instruction(following, send=True))
        if answer.problem is not None:
            raise answer.problem.error()
        assert answer.sampled is not None
        self._used, self._asked = self._asked, following
        if following is not None:
            self._send(following)
        return answer.sampled

    def staleness(self) -> int:
        """See :class:`~hetero_megatron.training.answers.Sampler`."""
        assert self._used is not None
        return self._done() - self._used.weights

    def _following(self, first: int) -> RolloutRequest | None:
        """What comes after the answers from ``first`` on; None: they are the last, or not sampled ahead."""
        iterations = self._grpo.iterations
        if not self._grpo.ahead or self._done() + iterations >= self._steps:
            return None
        return self._request(first + iterations * self._size)

    def _request(self, first: int) -> RolloutRequest:
        """Weights come with the first answers of a run, and with the next ones after every ``sync_every`` steps."""
        done, every = self._done(), self._grpo.sync_every
        if self._held is None or done // every > self._held // every:
            self._held = done
            return RolloutRequest(first, done, True)
        return RolloutRequest(first, self._held, False)

    def _send(self, request: RolloutRequest) -> None:
        if not request.sync:
            return
        assert self._runtime is not None
        self.comm.activity = "sending weights to the generator"
        self._runtime.hooks.before_reading()
        built = self._runtime.stage_model
        self._transfer.send(dict(built.module.named_parameters()), built.boxes)


def generator_client(config: RunConfig, comm: Comm) -> GeneratorClient:
    """Of a run; called on all ranks that train."""
    assert config.grpo is not None
    transfer = WeightTransfer(comm, config.compiled, config.compiled_role)
    world, size = comm.group(config.plan.ranks), config.plan.global_batch_size
    return GeneratorClient(comm, meeting_group(config, comm), world, config.grpo, transfer, size, config.steps)


def prompt_marks(config: RunConfig, data: Datasets) -> Mapping[str, str]:
    """What answers depend on beside weights, for comparisons between ranks."""
    assert isinstance(data.train, Prompts)
    ends = ends_of_answers(config, data.tokenizer)
    return {**corpora(data), "prompts": data.train.fingerprint(), "ends of answers": str(ends)}
