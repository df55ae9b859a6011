"""Small models exported as ONNX graphs, what their modules computed with, and the law that a reading must keep."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sqrtdk.tracing.tensors import CallTensors
from tests.hf.families import FAMILIES

LENGTH, DECODED = 12, 7


def build(family: str, attn: str) -> nn.Module:
    """A model in eval mode, no bias and no gain of which is what it begins as."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.use_cache = False
    model: nn.Module = getattr(hf, config.architectures[0])._from_config(config, attn_implementation=attn).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def inputs(family: str) -> dict[str, Tensor]:
    """Two sequences, the second padded on the right; token 0 is padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 160, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if family in ("t5", "bart"):
        given["decoder_input_ids"] = torch.randint(3, 160, (2, DECODED), generator=generator)
    return given


def export(model: nn.Module, given: dict[str, Tensor], path: Path, *, dynamo: bool, **options: Any) -> None:
    """Write a graph; whatever the exporters warn of is theirs."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), _silent_registry():
        warnings.simplefilter("ignore")
        if dynamo:
            torch.onnx.export(
                model, (), path, kwargs={**given, "use_cache": False}, dynamo=True, verbose=False, **options
            )
        else:
            torch.onnx.export(
                _Logits(model).eval(), tuple(given.values()), path, input_names=[*given], dynamo=False, **options
            )


@contextlib.contextmanager
def _silent_registry() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")  # of packages that are not installed
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Logits(nn.Module):
    """For the older exporter, which takes inputs in order, and outputs that are tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        more = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
        logits: Tensor = self.net(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **more).logits
        return logits


class Kept:
    """What the model's attention functions got and gave: (query, key, value, output), heads before rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.logits: Tensor | None = None


def run_module(model: nn.Module, given: dict[str, Tensor], monkeypatch: Any) -> Kept:
    """Run a module, and keep what its attention functions were called with."""
    kept = Kept()
    kind = type(ALL_ATTENTION_FUNCTIONS)
    before = kind.get_interface

    def get_interface(self: Any, *args: Any) -> Any:
        function = before(self, *args)

        def keep(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
            result = function(module, query, key, value, *rest, **more)
            kept.calls.append((query, key, value, result[0].transpose(1, 2)))
            return result

        return keep

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(kind, "get_interface", get_interface)
        kept.logits = model(**given, use_cache=False).logits
    return kept


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """Key heads as query heads read them."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def logits(call: CallTensors) -> tuple[Tensor, Tensor]:
    """Logits in float64, and one number a row for each sink, by the terms of a call."""
    heads = call.query.values.shape[1]
    z = call.query.values.double() @ repeated(call.key.values.double(), heads).mT
    sinks = z.new_empty(*z.shape[:-1], 0)
    assert call.terms is not None
    for term in call.terms:
        if term.name == "scale":
            z = z * term.value
        elif term.name == "softcap":
            z = term.value * torch.tanh(z / term.value)
        elif term.name == "bias":
            z = z + term.value
        elif term.name == "mask":
            z = z.masked_fill(~term.value, term.fill)
        else:
            assert term.name == "sinks", term
            sinks = term.value.double()[None, :, None, None].expand(*z.shape[:-1], 1)
    return z, sinks


def recomputed(call: CallTensors) -> Tensor:
    """softmax(terms(q.k)) . v in float64; a row that sees no key is 0."""
    z, sinks = logits(call)
    weights = torch.cat((z, sinks), -1).softmax(-1).nan_to_num(0.0)[..., : z.shape[-1]]
    return weights @ repeated(call.value.values.double(), z.shape[1])


def allowed(call: CallTensors) -> float:
    """What rounding of float32 may do to the output: of the products, of the logits, and of the weights.

    Each logit is a sum of E products, with an error of at most (E + 4) eps |q||k|; a weight has the relative error of
    twice that and of the softmax's own sum, and an output is a sum of S weights times values.
    """
    eps = torch.finfo(getattr(torch, call.dtype)).eps
    q, k, v = (vector.values.double() for vector in (call.query, call.key, call.value))
    scales = [abs(term.value) for term in call.terms or () if term.name == "scale" and isinstance(term.value, float)]
    size = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * (torch.tensor([1.0, *scales]).prod().item())
    biases = [term.value for term in call.terms or () if term.name == "bias"]
    size += sum(float(bias.double().abs().max()) for bias in biases)
    return eps * (2 * (q.shape[-1] + 4) * size + 2 * k.shape[2] + 4) * float(v.abs().max())
