"""Position terms as a bias (Hq, L, S), for implementations that know no terms."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor, nn

from sqrtdk.errors import SqrtdkError
from sqrtdk.impl.call import Call, grow


def with_bias(call: Call) -> Call:
    """The call with its position term as a bias, (Hq, L, S)."""
    if call.term is None:
        return call
    rows, columns = call.positions(0, call.length) + call.shift, torch.arange(call.keys, device=call.query.device)
    term = call.term.term(call.query, grow(call.key, call.heads), rows, columns)
    return replace(call, bias=term if call.bias is None else call.bias + term, term=None)


def check_term(call: Call) -> None:
    """Refuse a position term whose sizes do not fit: that of the first row and key is computed."""
    query, key, value = (x[..., :1, :] for x in (call.query, call.key, call.value))
    first = Call(query, key, value, 1.0, term=call.term, shift=call.shift)
    with torch.no_grad():
        try:
            with_bias(first)
        except SqrtdkError:
            with_bias(call)  # its error has the sizes that were given
            raise


def learns_term(call: Call) -> bool:
    """Whether the position term has a parameter or a tensor that learns."""
    term: object = call.term
    if term is None:
        return False
    held: list[object] = []
    if isinstance(term, nn.Module):  # in place of a parameter a caller may have put a tensor that learns
        held = [value for part in term.modules() for value in (*part.parameters(recurse=False), *vars(part).values())]
    elif is_dataclass(term):
        held = [getattr(term, field.name) for field in fields(term)]
    else:
        return True  # of unknown make
    return any(isinstance(value, Tensor) and value.requires_grad for value in held)
