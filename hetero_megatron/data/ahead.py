"""What modules that predict further tokens get of a micro-batch (``model/prediction.py``)."""

from __future__ import annotations

from dataclasses import replace

import torch

from hetero_megatron.data.batch import Ahead, Batch


def look_ahead(batch: Batch, depth: int) -> Batch:
    """A batch of whole sequences with what is 1, ..., ``depth`` tokens ahead. Made before a rank takes its own tokens
    of them, so that a target may lie in another rank's."""
    length = batch.labels.shape[1]
    ends = torch.full_like(batch.labels, length)  # [b, s], of the document of each position
    for row, starts in zip(ends, batch.documents or (), strict=False):
        edges = [*starts, length]
        for start, end in zip(edges, edges[1:]):
            row[start:end] = end
    places = torch.arange(length, device=ends.device)
    shifted = []
    for k in range(1, depth + 1):
        in_document = places + k < ends
        mask = in_document if batch.loss_mask is None else in_document & _shifted(batch.loss_mask, k)
        shifted.append(Ahead(_shifted(batch.labels, k - 1) * in_document, _shifted(batch.labels, k) * mask, mask))
    return replace(batch, ahead=tuple(shifted))


def _shifted(x: torch.Tensor, k: int) -> torch.Tensor:
    """Position i has what i + k had, [b, s]; the last ones have 0."""
    return torch.nn.functional.pad(x[:, k:], (0, k))


def with_targets_ahead(batch: Batch) -> Batch:
    """The batch whose rows are those of the main loss, then those of each module: labels and mask, [(1 + n) b, s]."""
    mask = batch.loss_mask if batch.loss_mask is not None else torch.ones_like(batch.labels, dtype=torch.bool)
    labels, masks = [batch.labels, *(a.labels for a in batch.ahead)], [mask, *(a.mask for a in batch.ahead)]
    return replace(batch, labels=torch.cat(labels), loss_mask=torch.cat(masks), counted=None)
