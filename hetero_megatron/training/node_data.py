"""The data sets of a rank: what can be addressed by sample is opened by every rank, a stream by one rank of each node.

That rank reads, tokenizes and packs; the other ranks of the node ask it for the samples that the plan gives them (see
:mod:`~hetero_megatron.data.sample_server`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_megatron.comm import Comm, Group
from hetero_megatron.comm.group import together
from hetero_megatron.data import Datasets, build_datasets
from hetero_megatron.data.batch import BatchLoader, BatchOptions
from hetero_megatron.data.mock import unigram_entropy
from hetero_megatron.data.sample import Dataset
from hetero_megatron.errors import UserError, printable
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.text import rank_ranges, word

if TYPE_CHECKING:
    from hetero_megatron.data.sample_server import SampleServer

BOOT = Path("/proc/sys/kernel/random/boot_id")
HostKey = tuple[str, str, int, int]


def _show(text: str) -> None:
    print(printable(text), flush=True)


class NodeData:
    """Builds the data sets of this rank; all ranks of ``world`` (those of the plan) make it at once. ``log``: the
    first one prints what they are.

    Attributes:
        datasets: as if this rank had read everything itself.
        wrapped: by ``id`` of one of them, what batches are made of instead.
        on_close: called at the end.

    Raises:
        UserError: what is wrong with the data.
    """

    def __init__(self, config: RunConfig, comm: Comm, world: Group, log: bool = True) -> None:
        assert config.data is not None, "the command line refuses training without data"
        self._flags = config.data
        self._comm, self._world = comm, world
        self._server: SampleServer | None = None
        self.wrapped: dict[int, Dataset] = {}
        self.on_close: list[Callable[[], None]] = []
        valid = config.evaluation.iterations * config.plan.global_batch_size
        sample_counts = (0 if config.skip_train else config.train_samples, valid, valid)
        self._log = _show if log and world.index == 0 else (lambda _: None)
        # Ranks are at most one step apart, and each prepares the batch after its own.
        keep = 2 * config.plan.global_batch_size
        build: Callable[..., Datasets] = partial(
            build_datasets, config.data, config.plan.seq_length, config.seed, sample_counts, config.spec.vocab_size,
            self._log, keep,
        )  # fmt: skip
        reads_alone = world.size == 1 or not config.data.reads_stream
        self.datasets = build() if reads_alone else self._share(build)

    def _share(self, build: Callable[..., Datasets]) -> Datasets:
        from hetero_megatron.data.sample_server import SampleClient, SampleServer, ServedDataset

        world, comm = self._world, self._comm
        hosts = together(world, lambda: host_key(comm.launcher.node), HostKey)
        readers = [world.ranks[hosts.index(host)] for host in hosts]  # of each rank
        self._log(_line(readers))
        reader = readers[world.index]
        datasets: list[Datasets] = []

        def read() -> tuple[str, dict[str, str]]:
            """(the path of this rank's socket; empty: it does not read, or for nobody else, what it reads)."""
            if comm.rank != reader:
                return "", {}
            datasets.append(build())
            marks = dict(datasets[0].read_here()) if len(set(readers)) > 1 else {}
            sets = enumerate((datasets[0].train, datasets[0].valid, datasets[0].test))
            if (clients := readers.count(reader) - 1) == 0:
                return "", marks
            self._server = SampleServer({i: dataset for i, dataset in sets if dataset is not None}, clients)
            return self._server.path, marks

        def connect() -> None:
            if comm.rank != reader:
                on_failure = partial(comm.failure, (reader,), activity="reading samples")
                path = paths[world.ranks.index(reader)]
                client = SampleClient(path, comm.timeout.total_seconds(), on_failure)
                datasets.append(build(served=partial(ServedDataset, client)))

        paths_and_marks: Sequence[tuple[str, dict[str, str]]] = together(world, read, tuple[str, dict[str, str]])
        paths = [path for path, _ in paths_and_marks]
        _check_alike({rank: marks for rank, (_, marks) in zip(world.ranks, paths_and_marks, strict=True) if marks})
        together(world, connect)
        if self._server is not None:
            self._server.start()
        return datasets[0]

    def loader(self, data: Dataset) -> BatchLoader:
        """Batches of one of the data sets, as the flags have positions and attention at the ends of documents."""
        flags = self._flags
        separate = flags.sft  # conversations that share a sample do not see each other
        options = BatchOptions(
            flags.reset_position_ids or separate, flags.reset_attention_mask or separate, flags.eod_mask_loss,
            self.datasets.eod,
        )  # fmt: skip
        workers = 0 if flags.grpo else flags.num_workers  # the next batch is sampled by weights that are not there yet
        return BatchLoader(self.wrapped.get(id(data), data), options, workers)

    def describe(self, data: Dataset) -> str:
        """A conversation as it is trained on, or the entropy of single tokens; reads the first samples of ``data``."""
        if self._flags.grpo:
            return f"data: the first prompt:\n{self.datasets.tokenizer.decode(data.prompt(0).ids)}"  # type: ignore[attr-defined]
        if self._flags.sft:
            from hetero_megatron.data.chat.build import show_sample

            return show_sample(data[0], self.datasets.tokenizer)
        entropy = unigram_entropy(data, num_samples=64)
        return f"data: unigram entropy {entropy:.3f} nats, the loss of counting tokens alone"

    def close(self, problem: UserError | None = None) -> None:
        """Stop serving other ranks; ``problem``: why, which they raise as well if they ask again."""
        if self._server is not None:
            self._server.close(problem)
        for close in self.on_close:
            close()


def host_key(node: str | None) -> HostKey:
    """Equal for ranks that can share a socket: same node (its name, or the host's), same kernel, same folder."""
    from hetero_megatron.data.sample_server import socket_folder

    try:
        boot = BOOT.read_text().strip()
    except OSError:  # not Linux
        boot = ""
    folder = os.stat(socket_folder())
    return node or socket.gethostname(), boot, folder.st_dev, folder.st_ino


def _check_alike(marks: Mapping[int, Mapping[str, str]]) -> None:
    """UserError, on all ranks, unless all readers (by rank) read the same streams."""
    for rank, rank_marks in marks.items():
        first_rank, first_marks = next(iter(marks.items()))
        for name, mark in rank_marks.items():
            if mark != first_marks[name]:
                raise UserError(
                    f"rank {rank} reads {mark}, rank {first_rank} reads {first_marks[name]}", field=f"data ({name})",
                    accepted="the same files, byte for byte, and tokenizer on every node that reads them",
                )  # fmt: skip


def _line(readers: Sequence[int]) -> str:
    """What the run prints about who reads; ``readers``: of each rank."""
    distinct = sorted(set(readers))
    text = f"{word(len(distinct), 'rank')} {rank_ranges(distinct)} {word(len(distinct), 'reads', 'read')}"
    return f"data: one rank of each node reads the stream for the others: {text}, for {len(readers)} ranks"
