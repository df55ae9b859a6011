"""ONNX's recurrent layers in torch: RNN, GRU and LSTM, one step after another.

torch's own layers lack the GRU whose reset gate acts before the product (`linear_before_reset = 0`, ONNX's default)
and a bidirectional layer whose states stay apart, so each layer is a loop over the specification's equations:

    RNN:   h' = f(x W + h R)
    GRU:   z, r = f(x W + h R);  n = g(x W + (r h) R)  or  g(x W + r (h R));  h' = (1 - z) n + z h
    LSTM:  i, o, f = f(x W + h R);  c' = f c + i g(x W + h R);  h' = o k(c')

Reference: https://onnx.ai/onnx/operators/onnx__GRU.html, onnx__LSTM.html and onnx__RNN.html. Attributes that change the
result otherwise (clip, input_forget, peepholes, activations with numbers of their own) are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_step import OnnxStep, Operation, Result

States = tuple[Tensor, ...]  # the hidden state (B, H), and the cell of an LSTM
Activation = Callable[[Tensor], Tensor]
Activations = tuple[Activation, ...]
# (x W + its bias, states, weight = R transposed, its bias, by = activations) to the next states
Cell = Callable[..., States]
_OWN_ACTIVATIONS: dict[str, Activation] = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}
_BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _rnn(fed: Tensor, states: States, weight: Tensor, bias: Tensor, by: Activations) -> States:
    return (by[0](fed + states[0] @ weight + bias),)


def _gru(fed: Tensor, states: States, weight: Tensor, bias: Tensor, by: Activations, late: bool = False) -> States:
    (h,), size = states, states[0].shape[-1]
    gates = by[0](fed[:, : 2 * size] + h @ weight[:, : 2 * size] + bias[: 2 * size])
    z, r = gates.chunk(2, -1)
    weight, bias = weight[:, 2 * size :], bias[2 * size :]
    n = by[1](fed[:, 2 * size :] + (r * (h @ weight + bias) if late else (r * h) @ weight + bias))
    return ((1 - z) * n + z * h,)


def _lstm(fed: Tensor, states: States, weight: Tensor, bias: Tensor, by: Activations) -> States:
    h, c = states
    i, o, f, new = (fed + h @ weight + bias).chunk(4, -1)
    c = by[0](f) * c + by[0](i) * by[1](new)
    return by[0](o) * by[2](c), c


# By operator: the layer of torch as which a trace knows the result, the cell, its activations and its states.
_CELLS: dict[str, tuple[type[nn.RNNBase], Cell, tuple[str, ...], int]] = {
    "RNN": (nn.RNN, _rnn, ("Tanh",), 1),
    "GRU": (nn.GRU, _gru, ("Sigmoid", "Tanh"), 1),
    "LSTM": (nn.LSTM, _lstm, ("Sigmoid", "Tanh", "Tanh"), 2),
}


def _layer(kind: type[nn.RNNBase]) -> nn.Module:
    """Return a module of a torch layer's class that runs the function it is called with.

    A trace takes the results of torch's recurrent layers as states of a recurrence, however they were computed.
    """

    class Layer(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def forward(self, run: Callable[[], States]) -> States:
            return run()

    return Layer()


def _recurrent(step: OnnxStep) -> Result:
    """Return the outputs of RNN, GRU or LSTM: Y, Y_h and, for an LSTM, Y_c."""
    kind, cell, usual, count = _CELLS[step.node.op]
    direction = step.attribute("direction", "forward")
    if direction not in _BACKWARDS:
        raise UnsupportedError(f"{step.node.op} with direction = {direction[:40]}")
    backwards = _BACKWARDS[direction]
    activations = _activations(step, usual, len(backwards))
    if step.node.op == "GRU" and step.attribute("linear_before_reset", 0):
        cell = partial(_gru, late=True)
    batch_first = bool(step.attribute("layout", 0))
    x, inputs, recurrent = step.tensor(0), step.tensor(1), step.tensor(2)
    x = x.transpose(0, 1) if batch_first else x  # (L, B, features)
    size = step.attribute("hidden_size", recurrent.shape[-1])
    both = step.optional(3)
    both = inputs.new_zeros(len(backwards), 2 * inputs.shape[1]) if both is None else both
    lengths = step.optional(4)
    first = [_initial(step, 5 + state, (len(backwards), x.shape[1], size), x, batch_first) for state in range(count)]

    def run() -> States:
        lanes = []
        for lane, reverse in enumerate(backwards):
            bias_in, bias = both[lane].chunk(2)
            move = partial(cell, weight=recurrent[lane].mT, bias=bias, by=activations[lane])
            fed = x @ inputs[lane].mT + bias_in
            lanes.append(_scan(move, fed, tuple(state[lane] for state in first), lengths, reverse))
        # Y is (L, directions, B, H), or (B, L, directions, H); the last states are (directions, B, H), or (B, ...).
        rows = [made.transpose(0, 1) if batch_first else made for made, _ in lanes]
        ends = [torch.stack([states[i] for _, states in lanes], int(batch_first)) for i in range(count)]
        return torch.stack(rows, 2 if batch_first else 1), *ends

    made: States = _layer(kind)(run)
    return made


def _scan(
    move: Callable[[Tensor, States], States], fed: Tensor, states: States, lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, States]:
    """Return the hidden state of each step, zero beyond a sequence's end, and the states after its last step."""
    if lengths is not None:  # a sequence of no step leaves zeros in onnxruntime; the specification is silent
        states = tuple(torch.where((lengths > 0)[:, None], state, 0.0) for state in states)
    rows: dict[int, Tensor] = {}
    for at in reversed(range(len(fed))) if reverse else range(len(fed)):
        new = move(fed[at], states)
        if lengths is None:
            rows[at], states = new[0], new
            continue
        # Sequences are padded at the end: read backwards, one of 3 steps begins at its third.
        alive = (lengths > at)[:, None]
        rows[at] = torch.where(alive, new[0], 0.0)
        states = tuple(torch.where(alive, after, before) for after, before in zip(new, states, strict=True))
    return torch.stack([rows[at] for at in range(len(fed))]), states


def _initial(step: OnnxStep, index: int, shape: tuple[int, ...], x: Tensor, batch_first: bool) -> Tensor:
    found = step.optional(index)
    if found is None:
        return x.new_zeros(shape)
    return found.transpose(0, 1) if batch_first else found


def _activations(step: OnnxStep, usual: tuple[str, ...], lanes: int) -> list[Activations]:
    """Return the activations of each direction."""
    listed = step.attribute("activations", None) or list(usual) * lanes
    names = [(name.decode() if isinstance(name, bytes) else name) for name in listed]
    odd = [name[:40] for name in names if name.lower() not in _OWN_ACTIVATIONS]  # onnxruntime ignores their case
    if odd or len(names) != len(usual) * lanes:
        shown = odd or [name[:40] for name in names[:8]]
        raise UnsupportedError(f"{step.node.op} with the activations {', '.join(shown)}")
    by = tuple(_OWN_ACTIVATIONS[name.lower()] for name in names)
    return [by[lane * len(usual) : (lane + 1) * len(usual)] for lane in range(lanes)]


RECURRENT_OPERATIONS: dict[str, Operation] = dict.fromkeys(_CELLS, _recurrent)
