"""Law `gradient`: a softmax written by hand is judged, and its fault is named; hooks of the user's are no fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from sqrtdk.laws import ask
from sqrtdk.messages import Message
from tests.laws.backward_models import One, features
from tests.laws.written_softmaxes import FORMS, Cut, logits


def said(answers: Any) -> tuple[str, ...]:
    """Return what the law says of each fault: "code: operands"."""
    texts = [one.reason for one in answers if one.state == BROKEN]
    faults = [text.values["what"] if text.id.endswith(".several") else text for text in texts]
    faults = [text.values["what"] if text.id.endswith(".at") else text for text in faults]
    assert all(isinstance(text, Message) for text in faults)
    return tuple(f"{text.id.rpartition('.')[2]}: {text.values['operands']}" for text in faults)


def asked(name: str, cut: Cut, dtype: torch.dtype = torch.float32) -> Any:
    """Ask the law of a form."""
    module = One(lambda q, k, v: FORMS[name].attend(cut, q, k, v)).to(dtype).train()
    return ask(module, {"x": features()["x"].to(dtype)}, "gradient").answers


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FORMS)
def test_a_written_softmax_is_kept_and_its_fault_is_named(name: str) -> None:
    right = asked(name, lambda x: x)
    assert [(one.state, one.reason) for one in right] == [(KEPT, "")]
    assert said(asked(name, Tensor.detach)) == FORMS[name].says


@pytest.mark.full
@pytest.mark.parametrize("name", FORMS)
def test_a_written_softmax_in_bfloat16_is_not_called_broken(name: str) -> None:
    assert said(asked(name, lambda x: x, torch.bfloat16)) == ()


def _hooked(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)  # type: ignore[no-untyped-call]
    return x


def _doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


def _doubled_in_place(gradient: Tensor) -> None:
    gradient.mul_(2.0)


class Core(nn.Module):
    """An attention with modules, whose gradients a hook doubles."""

    def __init__(self, hooked: str) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)
        if hooked in ("core", "softmax"):
            part = self if hooked == "core" else self.softmax
            part.register_full_backward_hook(lambda _, given, got: tuple(2 * x for x in given))
        elif hooked == "before the softmax":
            self.softmax.register_full_backward_pre_hook(lambda _, got: tuple(2 * x for x in got))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.softmax(q @ k.mT * 0.25) @ v


CORE = Core("")
HOOKED: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "q": (lambda q, k, v: CORE(_hooked(q, _doubled), k, v), True),
    "in place": (lambda q, k, v: CORE(q, _hooked(k, _doubled_in_place), v), True),
    "clipped": (lambda q, k, v: CORE(q, k, _hooked(v, lambda gradient: gradient.clamp(-0.01, 0.01))), True),
    "a module around it": (Core("core"), True),
    "the weights": (lambda q, k, v: _hooked(logits(q, k).softmax(-1), _doubled) @ v, False),
    "the output": (lambda q, k, v: _hooked(CORE(q, k, v), _doubled), False),
    "a module of it": (Core("softmax"), False),
    "what reaches a module of it": (Core("before the softmax"), False),
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_of_the_user_are_no_fault_of_the_attention(name: str) -> None:
    attend, judged = HOOKED[name]
    (answer,) = ask(One(attend), features(), "gradient").answers
    assert answer.state == (KEPT if judged else NOT_ASKED)
    assert str(answer.reason) == ("" if judged else str(Message("laws.gradient.hook")))


def test_a_fault_beside_a_hook_is_named() -> None:
    module = One(lambda q, k, v: CORE(_hooked(q, _doubled), k.detach(), v))
    assert said(ask(module, features(), "gradient").answers) == ("none: k",)
