"""One rule run on records made by hand, and a model whose modules hold what a test wants."""

import dataclasses
import math

from torch import nn

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import SEVERITIES, Finding
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.tracing.records import Mask


class Layer(nn.Module):
    """A module with whatever attributes and children a test wants at `layers.0.attn`."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def model_with(layers=1, **attributes):
    root = nn.Module()
    root.layers = nn.ModuleList(Layer(attn=Layer(**attributes)) for _ in range(layers))
    return root


def run(name, calls, model=None, **context):
    model = model if model is not None else model_with()
    found = list(RULES[name](Context(model, judge_all(calls, model), "dynamic", **context)))
    for finding in found:
        assert isinstance(finding, Finding)
        assert finding.rule == name
        assert finding.severity in SEVERITIES
        assert finding.source
        assert finding.fix
        assert "\n" not in finding.message
    return found


def severities(found):
    return [finding.severity for finding in found]


def mask(**changes):
    return dataclasses.replace(Mask("causal", "float", 0, 0, 0.0, -math.inf), **changes)
