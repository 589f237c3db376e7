"""Prepares the next step's micro-batches in background threads while the current step computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hetero_megatron.data.batch import Batch, BatchOptions, make_batch
from hetero_megatron.data.sample import Dataset

_Key = tuple[int, ...]


class BatchLoader:
    """Maps global sample indices to their batch, with prefetching that never changes the result.

    Call ``advance(n)`` once per step, after fetching its batches: the same requests, ``n`` samples later, are then
    prepared in the background. A background error is raised by the request that it belongs to.

    Args:
        num_workers: threads; 0: no prefetching.
    """

    def __init__(self, dataset: Dataset, options: BatchOptions, num_workers: int = 2) -> None:
        self._dataset, self._options = dataset, options
        self._pool = ThreadPoolExecutor(num_workers, "data") if num_workers else None
        self._requests: list[_Key] = []
        self._prepared: dict[_Key, Future[Batch]] = {}

    def __call__(self, indices: Sequence[int]) -> Batch:
        key = tuple(indices)
        self._requests.append(key)
        future = self._prepared.pop(key, None)
        return make_batch(self._dataset, key, self._options) if future is None else future.result()

    def advance(self, samples: int) -> None:
        """A step of ``samples`` global samples was fetched: prepare the next one."""
        requests, self._requests = self._requests, []
        self.prefetch([[i + samples for i in key] for key in dict.fromkeys(requests)])

    def prefetch(self, requests: Sequence[Sequence[int]]) -> None:
        """Prepare these batches and drop prepared ones that were not fetched."""
        for future in self._prepared.values():
            future.cancel()
        self._prepared.clear()
        if self._pool is not None:
            for indices in requests:
                key = tuple(indices)
                self._prepared[key] = self._pool.submit(make_batch, self._dataset, key, self._options)

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
