"""Divergences of two distributions over the same outcomes, term by term, so that ranks can divide the outcomes."""

from __future__ import annotations

import math

import torch

from hetero_megatron.spec.distillation import Distillation


def divergence_terms(
    student: torch.Tensor, teacher: torch.Tensor, d: Distillation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of log-probabilities p and q of the same outcomes, [..., n] each, -inf where one is impossible:

    Returns:
        terms [..., n], whose sum over all outcomes is the divergence;
        slopes [..., n]: p times the derivative with respect to p, up to a multiple of p: with their sum s over all
        outcomes, the gradient with respect to the student's logits is slopes - p s.
    """
    p, q = student.exp(), teacher.exp()
    if d.loss == "forward_kl":
        return _weighted(q, teacher - student), -q
    if d.loss == "reverse_kl":
        terms = _weighted(p, student - teacher)
        return terms, terms
    mixture = torch.logaddexp(teacher + math.log(d.js_beta), student + math.log1p(-d.js_beta))
    student_terms = (1 - d.js_beta) * _weighted(p, student - mixture)
    return d.js_beta * _weighted(q, teacher - mixture) + student_terms, student_terms


def _weighted(probability: torch.Tensor, logarithm: torch.Tensor) -> torch.Tensor:
    """0 log 0 is 0."""
    return torch.where(probability > 0, probability * logarithm, 0.0)
