"""Sides that answer: what gives log-probabilities of the next token for prompts of token ids, and can't be opened.

A side is asked prompts and gives `Answers`. `Function` is a function of token ids, `Session` an ONNX model that
onnxruntime runs; `sqrtdk.answers.server.Server` asks over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sqrtdk._extras import load_extra
from sqrtdk.answers.rows import Answers, Prompt, answers_of_rows, joined_answers
from sqrtdk.errors import INTERRUPTS, InvalidValueError, ModelError, short_text
from sqrtdk.messages import Message

if TYPE_CHECKING:
    from jaxtyping import Float

KEPT_LOGPROBS = 64  # log-probabilities of a place that are kept, of a side that gives all


class Side(Protocol):
    """What answers prompts."""

    @property
    def name(self) -> str:
        """Return what the report calls it: an address, `package.module:function`, a file."""
        ...

    def planned(self, prompts: Sequence[Prompt]) -> int:
        """Return how many requests the prompts take."""
        ...

    def ask(self, prompts: Sequence[Prompt]) -> Answers:
        """Return log-probabilities of the next token behind some or all places of the prompts.

        Raises:
            ModelError: It gives no answer, or one that can't be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class Function:
    """A function of token ids.

    Attributes:
        call: Takes the ids of one prompt, a list of L ints. Returns logits or log-probabilities, an array of (L, V) or
            (1, L, V) of torch, NumPy or JAX, or of (V,) for the last place alone; or a sequence with one mapping from
            token id to log-probability (nats) for each of the L places, empty where it has none.
        name: What the report calls it.
        top: How many log-probabilities of a place are kept.

    Example:
        >>> side = Function(lambda ids: torch.eye(3)[ids])
        >>> side.ask([(0, 2)]).ids[:, 0]
        tensor([0, 2])
    """

    call: Callable[[list[int]], Any]
    name: str = "function"
    top: int = KEPT_LOGPROBS

    def planned(self, prompts: Sequence[Prompt]) -> int:
        """Return the number of calls."""
        return len(prompts)

    def ask(self, prompts: Sequence[Prompt]) -> Answers:
        """Return the answers to prompts.

        Raises:
            ModelError: The function raises.
            InvalidValueError: It returns another shape, or NaN.
        """
        return joined_answers(self._ask(number, prompt) for number, prompt in enumerate(prompts))

    def _ask(self, number: int, prompt: Prompt) -> Answers:
        try:
            given = self.call(list(prompt))
        except INTERRUPTS:
            raise
        except Exception as error:  # the user's own code may raise anything
            raise ModelError(Message("answers.error.raised", name=self.name, reason=short_text(error))) from error
        if isinstance(given, Sequence) and all(isinstance(row, Mapping) for row in given):
            if len(given) != len(prompt):
                raise _wrong_shape(self.name, f"{len(given)} rows", prompt)
            listed = [
                (number, place, {int(id): float(value) for id, value in row.items()}) for place, row in enumerate(given)
            ]
            return answers_of_rows([row for row in listed if row[2]])
        values = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
        values = values.detach().cpu().double()
        if values.dim() == 1:
            return answers_of_logits(values[None], number, len(prompt) - 1, self.top, self.name)
        if values.dim() == 3 and len(values) == 1:
            values = values[0]
        if values.dim() != 2 or len(values) != len(prompt):
            raise _wrong_shape(self.name, str(tuple(values.shape)), prompt)
        return answers_of_logits(values, number, 0, self.top, self.name)


@dataclass(frozen=True, slots=True)
class Session:
    """An ONNX model that onnxruntime runs: a causal language model that takes token ids and returns logits.

    Attributes:
        session: A session of onnxruntime; see `session_of`.
        name: What the report calls it.
        top: How many log-probabilities of a place are kept.
    """

    session: Any
    name: str = "session"
    top: int = KEPT_LOGPROBS

    def planned(self, prompts: Sequence[Prompt]) -> int:
        """Return the number of runs."""
        return len(prompts)

    def ask(self, prompts: Sequence[Prompt]) -> Answers:
        """Return the answers to prompts; position ids and a mask are given to a model that asks for them.

        Raises:
            ModelError: The session fails.
            InvalidValueError: The model takes other inputs, or returns no logits of (1, L, V).
        """
        return Function(self._run, self.name, self.top).ask(prompts)

    def _run(self, ids: list[int]) -> Any:
        length = len(ids)
        known = {"input_ids": ids, "attention_mask": [1] * length, "position_ids": [*range(length)]}
        inputs = self.session.get_inputs()
        unknown = [each.name for each in inputs if each.name not in known and len(inputs) > 1]
        if unknown:
            raise InvalidValueError(Message("answers.error.inputs", name=self.name, inputs=", ".join(unknown)))
        feeds = {}
        for each in inputs:
            kind = np.int32 if each.type == "tensor(int32)" else np.int64
            feeds[each.name] = np.asarray([known.get(each.name, ids)], dtype=kind)
        outputs = self.session.run(None, feeds)
        return next((output for output in outputs if output.ndim == 3), outputs[0])


def session_of(path: str | Path) -> Session:
    """Open an ONNX file in onnxruntime, on the CPU.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: onnxruntime can't open it.
    """
    runtime = load_extra("onnxruntime", "onnx")
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes of errors share only Exception
        raise ModelError(Message("answers.error.raised", name=str(path), reason=short_text(error))) from error
    return Session(session, str(path))


def answers_of_logits(values: Float[Tensor, "L V"], prompt: int, first: int, top: int, name: str = "side") -> Answers:
    """Return the largest log-probabilities of rows of logits, or of log-probabilities.

    Args:
        values: Logits or log-probabilities in nats, float64: their softmax is the same.
        prompt: Number of the prompt.
        first: Place of the first row.
        top: How many are kept.
        name: Of the side, for the error.

    Raises:
        InvalidValueError: They have NaN.
    """
    if values.isnan().any():
        raise InvalidValueError(Message("answers.error.nan", name=name))
    listed, ids = values.log_softmax(-1).topk(min(top, values.shape[-1]))
    places = torch.arange(len(values))
    return Answers(torch.full_like(places, prompt), places + first, ids, listed)


def _wrong_shape(name: str, given: str, prompt: Prompt) -> InvalidValueError:
    message = Message("answers.error.shape", name=name, given=given, length=len(prompt))
    return InvalidValueError(message, hint=Message("answers.hint.shape"))
