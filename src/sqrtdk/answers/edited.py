"""Copies of a model whose parts can be changed: parameters are shared until an edit replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sqrtdk.answers.attend import CHANGES_HERE, SEEN, AttentionFacts, attending, use_in_transformers
from sqrtdk.answers.copies import shared_copy
from sqrtdk.answers.rows import Answers, Prompt
from sqrtdk.errors import INTERRUPTS, ModelError, short_text
from sqrtdk.messages import Message

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, slots=True, eq=False)
class Edited:
    """A copy that edits may change.

    Attributes:
        module: The copy.
        config: Its own config, which all its modules read; None if it has none.
        facts: What each attention was called with before any edit; empty if no attention could be watched.
    """

    module: nn.Module
    config: Any
    facts: tuple[AttentionFacts, ...]

    def attentions(self) -> Iterator[tuple[nn.Module, AttentionFacts]]:
        """Yield each attention module with its facts."""
        for fact in self.facts:
            yield self.module.get_submodule(fact.name), fact

    def change(self, module: nn.Module, **changes: Any) -> None:
        """Change the attention of one module; see `sqrtdk.answers.attend.CHANGES_HERE`."""
        module.__dict__[CHANGES_HERE] = module.__dict__.get(CHANGES_HERE, {}) | changes

    @property
    def embedding(self) -> nn.Embedding | None:
        """Return the table of the tokens: of a module of one's own, the one with the most rows."""
        if hasattr(self.module, "get_input_embeddings"):
            return self.module.get_input_embeddings()  # type: ignore[operator, no-any-return]
        tables = [module for module in self.module.modules() if isinstance(module, nn.Embedding)]
        return max(tables, key=lambda table: table.num_embeddings, default=None)

    @property
    def head(self) -> nn.Linear | None:
        """Return the layer that gives the logits: of a module of one's own, the last one of that many outputs."""
        if hasattr(self.module, "get_output_embeddings"):
            return self.module.get_output_embeddings()  # type: ignore[operator, no-any-return]
        table = self.embedding
        linears = [module for module in self.module.modules() if isinstance(module, nn.Linear)]
        wide = [module for module in linears if table is not None and module.out_features == table.num_embeddings]
        return wide[-1] if wide else None

    @property
    def width(self) -> int | None:
        """Return the width of the model, D."""
        table = self.embedding
        return getattr(self.config, "hidden_size", None) or (table.embedding_dim if table is not None else None)


def copy_of(model: nn.Module, facts: Sequence[AttentionFacts] = ()) -> Edited:
    """Return a copy that shares its parameters and runs the attention that edits change."""
    module = shared_copy(model).eval()
    use_in_transformers(module)
    return Edited(module, getattr(module, "config", None), tuple(facts))


@torch.no_grad()
def watch_attentions(model: nn.Module, prompt: Prompt) -> tuple[AttentionFacts, ...]:
    """Run a copy once and return what its attentions were called with.

    Raises:
        ModelError: It can't run on token ids alone, or returns no logits.
    """
    edited = copy_of(model)
    seen: dict[nn.Module, dict[str, Any]] = {}
    for module in edited.module.modules():
        module.__dict__[SEEN] = seen
    logits_of(edited.module, [prompt])
    names = {module: name for name, module in edited.module.named_modules()}
    return tuple(AttentionFacts(name=names[module], **fact) for module, fact in seen.items())


@torch.no_grad()
def own_values(module: nn.Module, prompt: Prompt, answers: Answers) -> Float[Tensor, "N K"]:
    """Return a model's log-probabilities of the tokens that the answers to a prompt list, float64.

    NaN stands where it has no such place.
    """
    own = torch.full(answers.values.shape, torch.nan, dtype=torch.float64)
    rows = answers.position < len(prompt)
    if rows.any():
        whole = logits_of(module, [prompt])[0][answers.position[rows]].double().log_softmax(-1)
        own[rows] = whole.gather(-1, answers.ids[rows].clamp(0, whole.shape[-1] - 1))
    return own


def logits_of(module: nn.Module, prompts: Sequence[Prompt]) -> Float[Tensor, "B L V"]:
    """Return the logits of prompts of one length.

    Raises:
        ModelError: The model raises, or returns no logits.
    """
    parameter = next(module.parameters(), None)
    ids = torch.tensor(prompts, device=parameter.device if parameter is not None else "cpu")
    try:
        with attending(module):
            output = module(input_ids=ids, use_cache=False) if hasattr(module, "config") else module(ids)
    except INTERRUPTS:
        raise
    except Exception as error:  # a user's module may raise anything
        reason = short_text(error)
        raise ModelError(Message("answers.error.model", reason=reason)) from error
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, tuple):
        logits = next((part for part in output if isinstance(part, Tensor) and part.dim() == 3), None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise ModelError(Message("answers.error.no_logits", kind=type(output).__name__))
    return logits.cpu()
