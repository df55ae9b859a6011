"""A module that knows how many parameters it should have: a formula beside the count."""

from __future__ import annotations

from torch import Tensor, nn

from sqrtdk.theory.parameters import Terms


class Counted(nn.Module):
    """Base of the modules here: `parameter_count()` counts, `expected_parameters()` computes the formula."""

    def parameter_terms(self) -> Terms:
        """The terms of the formula, from the sizes alone."""
        return Terms()

    def parameter_count(self) -> int:
        """Number of parameters that the module holds, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def expected_parameters(self) -> int:
        """Number of parameters that the formula gives."""
        return self.parameter_terms().total

    @property
    def parameter_formula(self) -> str:
        """The formula in symbols."""
        return self.parameter_terms().formula


def keep(module: nn.Module, name: str, value: object) -> None:
    """Keep what a caller passed as an attribute: a plain tensor becomes a buffer, so that it moves with the module."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)


def own_terms(name: str, part: object) -> Terms:
    """The parameters of a part that the caller passed: its own number, as no formula of it is known."""
    if isinstance(part, nn.Module):
        number = sum(parameter.numel() for parameter in part.parameters())
    else:
        number = part.numel() if isinstance(part, nn.Parameter) else 0
    return Terms(((f"{number} of the {name}", number),)) if number else Terms()
