"""Every sequence of stages that some chips of a small cluster can be, with what its pipeline takes at least.

A sequence says which chips its stages have, first stage first. Layers are divided for each by bisection on the
pipeline's time, for all sequences of as many stages at once: every stage takes the layers that it finishes in time, one
stage after the other. Times are those of :func:`closed_forms`, so transfers, bubbles, the head and the micro-batches
in flight count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.pipeline_time import closed_forms_of_each
from hetero_megatron.planner.estimate.stage_table import StageKind
from hetero_megatron.planner.problem import batch_sizes
from hetero_megatron.planner.search.materialize import ProgramInputs, added_seconds
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.utils.cached_method import cached_method

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Usage = tuple[int, ...]  # chips of each group
HALVINGS = 12  # of the interval in which a pipeline's time lies: to a thousandth, which is enough for ranking


@dataclass(frozen=True)
class StageSequence:
    """A pipeline without layers.

    Attributes:
        size: sequences of a micro-batch.
        seconds: of its share of the batch; tau: of a micro-batch in the slowest stage.
        delay: of what comes before the slowest stage begins and after it ends.
        main: group with most of the layers.
        near, far: of gradient reduction with pipelines of the same main group, of others.
    """

    stages: tuple[StageTemplate, ...]
    usage: Usage
    size: int
    seconds: float
    tau: float
    delay: float
    main: int
    near: float
    far: float


@dataclass(frozen=True)
class _Rows:
    """Sequences of as many stages: places in the list of options [sequences, stages], chips [sequences, groups]."""

    options: Integers
    usage: Integers


class StageSequences:
    """Those of one search."""

    def __init__(self, inputs: ProgramInputs) -> None:
        self.inputs, self.tables, self.layers = inputs, inputs.scorer.tables, inputs.model.num_layers
        self.chips, self.sizes = sum(inputs.counts), batch_sizes(inputs.space, inputs.batch)

    @cached_method
    def fastest(self, pipelines: int) -> list[StageSequence]:
        """Those of a plan with so many pipelines, fastest first, by what each takes for its share of the batch: as much
        as its chips are of the speed of all."""
        sequences, possible = (
            list[StageSequence](),
            self._speeds.any() and pipelines <= min(self.chips, self.inputs.batch),
        )
        for size in self.sizes if possible else ():
            for rows in self._rows(size):
                fits = rows.usage.sum(axis=1) <= self.chips - pipelines + 1
                if fits.any():
                    sequences += self._timed(_Rows(rows.options[fits], rows.usage[fits]), size, pipelines)
        return sorted(sequences, key=lambda x: (x.seconds, x.size, len(x.stages)))

    @cached_method
    def _options(self, size: int) -> list[StageTemplate]:
        return [x for g in range(len(self.inputs.counts)) for x in self.inputs.options(g, size)]

    @cached_method
    def _rows(self, size: int) -> list[_Rows]:
        options, counts = self._options(size), self.inputs.counts
        longest = min(self.tables.depth, self.layers + 2)
        by_length: dict[int, list[tuple[tuple[int, ...], Usage]]] = {}

        def extend(taken: tuple[int, ...], left: Usage) -> None:
            if taken:
                by_length.setdefault(len(taken), []).append((taken, left))
            for i, x in enumerate(options if len(taken) < longest else ()):
                if x.chips <= left[x.group]:
                    extend((*taken, i), (*left[: x.group], left[x.group] - x.chips, *left[x.group + 1 :]))

        extend((), counts)
        return [
            _Rows(
                np.array([taken for taken, _ in rows]),
                np.array(counts) - np.array([remaining for _, remaining in rows]),
            )
            for rows in by_length.values()
        ]

    @cached_property
    def _speeds(self) -> Floats:
        """[groups] layers per second of a chip, at best; 0 of groups without chips."""
        rates = [
            max((rate for size in self.sizes for _, rate in self.inputs.rates(g, size)), default=0.0) if chips else 0.0
            for g, chips in enumerate(self.inputs.counts)
        ]
        return np.array(rates)

    @cached_method
    def _seconds(self, size: int, pipelines: int, embed: bool, head: bool) -> Floats:
        """[options, in flight - 1, layers + 1]: of one micro-batch; inf where it does not fit, and last of all."""
        owners = 2 if self.tables.lent else pipelines  # whoever lends, states take nothing: one table does for all
        depth = min(self.chips, self.tables.depth)
        kinds = [
            StageKind(x.group, x.tp, x.dp, size, embed, head, owners, self.inputs.space.recompute)
            for x in self._options(size)
        ]
        rows = np.maximum.accumulate(np.stack([x.seconds for x in self.tables.tables(kinds, depth)]), axis=2)
        return np.concatenate([rows, np.full((*rows.shape[:2], 1), np.inf)], axis=2)

    def _neighbours(self, size: int) -> Iterator[tuple[tuple[int, int], StageTemplate, StageTemplate, bool]]:
        """(indices of two options, the options, whether they are likely in one node) of those that there are chips for
        together."""
        tables, counts = self.tables, self.inputs.counts
        for (i, a), (j, b) in itertools.product(enumerate(self._options(size)), repeat=2):
            if a.group != b.group or a.chips + b.chips <= counts[a.group]:
                yield (i, j), a, b, tables.likely_same_node(a, b)

    @cached_method
    def _links(self, size: int) -> Floats:
        """[options, options, there and back] seconds of a transfer; 0 between stages with more chips than there are."""
        seconds = np.zeros((len(self._options(size)), len(self._options(size)), 2))
        for pair, a, b, same_node in self._neighbours(size):
            seconds[pair] = self.tables.boundary(a, b, size, same_node)
        return seconds

    @cached_method
    def _messages(self, size: int) -> Floats:
        """[options, options, sender and receiver] seconds of a stage's hosts for the messages of a micro-batch, forward
        and backward, over a boundary, beyond what stage tables count."""
        seconds = np.zeros((len(self._options(size)), len(self._options(size)), 2))
        least_message = [self.tables.links.least_message(group.home) for group in self.inputs.pool.groups]
        for pair, a, b, same_node in self._neighbours(size):
            sent, received = self.tables.message_seconds(a, b, same_node)
            seconds[pair] = 2 * (sent - least_message[a.group]), 2 * (received - least_message[b.group])
        return seconds

    @cached_method
    def _reduction(self, size: int, pipelines: int, embed: bool, head: bool) -> Floats:
        """[options, layers, near and far, reducing and spreading] seconds, as :meth:`ProgramInputs.sync_seconds`;
        affine in the layers. Near: if the holders of a stage are in one node where so many fit."""
        memory, layers_in_all, by_option = self.inputs.scorer.costs.memory, self.layers, []
        for x in self._options(size):
            copies = pipelines * x.dp
            holders = np.array([copies, max(copies, self.inputs.pool.groups[x.group].per_node + 1.0)])
            no_layers, all_layers = (
                np.stack(self.inputs.sync_seconds(memory.trained(x.tp, n, embed, head), holders, [x.group]), axis=1)
                for n in (0, layers_in_all)
            )
            layers = np.arange(layers_in_all + 2)[:, None, None] / layers_in_all
            by_option.append((no_layers + (all_layers - no_layers) * layers) * (copies > 1))
        return np.stack(by_option)

    def _timed(self, rows: _Rows, size: int, pipelines: int) -> Iterator[StageSequence]:
        share = 1.0 if pipelines == 1 else rows.usage @ self._speeds / (np.array(self.inputs.counts) @ self._speeds)
        rounds = share * np.full(len(rows.options), self.inputs.batch / size)
        count = np.maximum(1.0, rounds)
        last, sequence = rows.options.shape[1] - 1, np.arange(len(count))
        tables, links, messages = list[Floats](), *(np.zeros((len(count), last, 2)) for _ in range(2))
        for s in range(last + 1):
            alive = np.minimum(last + 1 - s, np.ceil(count)).astype(np.int64)
            tables.append(self._seconds(size, pipelines, s == 0, s == last)[rows.options[:, s], alive - 1])
            if s < last:
                pair = rows.options[:, s], rows.options[:, s + 1]
                links[:, s], messages[:, s] = self._links(size)[pair], self._messages(size)[pair]
        for s in range(last):
            tables[s] += messages[:, s, :1]
            tables[s + 1] += messages[:, s, 1:]
        split = self._divided(tables, links.sum(axis=2), count)
        times = np.stack([table[sequence, split[:, s]] for s, table in enumerate(tables)], axis=1)
        seconds = closed_forms_of_each(times, links.sum(axis=2), count, round_trips=True)
        taus, late = np.maximum(times.max(axis=1), links.max(axis=(1, 2), initial=0.0)), np.zeros((len(count), 2))
        for s in range(last + 1):
            sync = self._reduction(size, pipelines, s == 0, s == last)[rows.options[:, s], split[:, s]]
            late = np.maximum(late, added_seconds((sync[:, :, 0], sync[:, :, 1]), times[:, s, None]))
        options, longest = self._options(size), split.argmax(axis=1)
        for i in np.flatnonzero(np.isfinite(seconds)).tolist():
            stages, (inside, across) = tuple(options[j] for j in rows.options[i].tolist()), late[i].tolist()
            total, tau, usage = float(seconds[i]), float(taus[i]), tuple(rows.usage[i].tolist())
            delay, main = total - float(count[i]) * tau, stages[longest[i]].group
            yield StageSequence(
                stages, usage, size, delay + inside + float(rounds[i]) * tau, tau, delay, main, inside, across
            )

    def _divided(self, tables: list[Floats], links: Floats, count: Floats) -> Integers:
        """[sequences, stages] layers; some for which a table has inf where they do not fit."""
        last, sequence = len(tables) - 1, np.arange(len(count))
        fewest = [0 if s in (0, last) else 1 for s in range(last + 1)]
        finite = np.stack([np.where(np.isfinite(x), x, 0.0).max(axis=1) for x in tables])
        low = np.zeros(len(count))
        high = (count + last + 1) * finite.max(axis=0) + links.sum(axis=1)

        def layers(limit: Floats) -> Integers:
            earlier, counts = np.zeros(len(count)), []
            for s, table in enumerate(tables):
                n = (count[:, None] * table <= ((limit - earlier) * (1 + 1e-12))[:, None]).sum(axis=1) - 1
                counts.append(np.where(n >= fewest[s], n, -1000))
                earlier = earlier + table[sequence, np.maximum(n, 0)] + (links[:, s] if s < last else 0.0)
            return np.stack(counts, axis=1)

        for _ in range(HALVINGS):
            middle = (low + high) / 2
            holds_all = layers(middle).sum(axis=1) >= self.layers
            low, high = np.where(holds_all, low, middle), np.where(holds_all, middle, high)
        split = layers(high)
        over = split.sum(axis=1) - self.layers
        for s in range(last, -1, -1):
            dropped = np.clip(split[:, s] - fewest[s], 0, np.maximum(over, 0))
            split[:, s], over = split[:, s] - dropped, over - dropped
        return np.where((over < 0)[:, None], self.layers + 1, np.maximum(split, 0))
