"""Projections of q, k and v that a test of designs puts its own attention behind, and the audit of such a model."""

import torch
from torch import nn

from sqrtdk._check import check

HEADS, WIDTH, LENGTH = 4, 16, 24


def found(report):
    """The rules that found something above a note."""
    return [finding.rule for finding in report.findings if finding.severity != "note"]


def audited(model, *inputs, static=False, length=LENGTH, batch=2):
    """The report, its one judged call, and the rules that found something above a note."""
    report = check(model, inputs or (torch.randn(batch, length, HEADS * WIDTH),), static=static)
    (judged,) = report.calls
    return report, judged, found(report)


class Projected(nn.Module):
    """Projections of q, k and v, each (B, H, L, E)."""

    def __init__(self, **attributes):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(3))
        for name, value in attributes.items():
            setattr(self, name, value)

    def heads(self, x):
        return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

    def projected(self, x):
        return (self.heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
