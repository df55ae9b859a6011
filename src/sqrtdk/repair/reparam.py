"""Two ways to keep attention from collapsing during training; see Zhai et al. 2023, arXiv:2303.06296.

Sigma-reparametrisation, from that paper: a weight is its direction times a learned size, so that its spectral norm
can't run away. `entropy_floor`, our own: a loss term that holds the entropy of attention above a floor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sqrtdk._arguments import finite_number
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from jaxtyping import Float

_FIRST_ITERATIONS = 30  # iterations at the start, from a random vector


class SigmaReparam(nn.Module):
    """The parametrisation: `gamma * W / sigma(W)`, sigma by power iteration in train mode.

    Attributes:
        gamma: the learned size, a number.
        u: left singular vector of the largest singular value, (rows,); a buffer.
        v: the right one, (columns,).
    """

    u: Tensor
    v: Tensor

    def __init__(self, weight: Float[Tensor, "rows ..."], gamma: float | None, iterations: int) -> None:
        super().__init__()
        matrix = _matrix(weight.detach())
        generator = torch.Generator().manual_seed(0)  # its own, so that the global random state is unchanged
        start = torch.randn(matrix.shape[1], generator=generator, dtype=torch.float64)
        self.register_buffer("v", start.to(matrix))
        self.register_buffer("u", matrix.new_zeros(matrix.shape[0]))
        self.iterations = iterations
        self._iterate(matrix, _FIRST_ITERATIONS)
        size = self._sigma(matrix) if gamma is None else matrix.new_tensor(gamma)
        self.gamma = nn.Parameter(size.detach().clone())

    def forward(self, weight: Float[Tensor, "rows ..."]) -> Float[Tensor, "rows ..."]:
        """Return the reparametrised weight, gamma W / sigma(W), in the shape and dtype of the weight.

        sigma(W) is the largest singular value of W as a matrix (rows, all others), estimated by power iteration.
        """
        matrix = _matrix(weight)
        # One iteration a step follows the weight, which moves little; evaluation must not change buffers.
        if self.training:
            self._iterate(matrix.detach(), self.iterations)
        tiny = torch.finfo(matrix.dtype).tiny
        # The clamp makes a weight of zeros 0 rather than NaN.
        return (self.gamma / self._sigma(matrix).clamp(min=tiny) * matrix).view(weight.shape).to(weight.dtype)

    def _sigma(self, matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, ""]:
        # copies, as a graph may still hold the buffers when the next iteration overwrites them
        u, v = (self._unit(each, matrix) for each in (self.u, self.v))
        return u.clone() @ (matrix @ v.clone())

    @staticmethod
    def _unit(vector: Float[Tensor, " n"], matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, " n"]:
        """Return the vector in the iteration's dtype, normalised again if a cast of the module rounded it."""
        # `module.half()` casts the buffers too, and a rounded vector no longer has length 1.
        if vector.dtype == matrix.dtype:
            return vector
        return nn.functional.normalize(vector.to(matrix.dtype), dim=0)

    @torch.no_grad()
    def _iterate(self, matrix: Float[Tensor, "rows columns"], times: int) -> None:
        for _ in range(times):
            self.u.copy_(nn.functional.normalize(matrix @ self.v.to(matrix.dtype), dim=0))
            self.v.copy_(nn.functional.normalize(matrix.mT @ self.u.to(matrix.dtype), dim=0))


def sigma_reparam(
    module: nn.Module, name: str = "weight", *, gamma: float | None = 1.0, iterations: int = 1
) -> nn.Module:
    r"""Reparametrise a weight: `W -> gamma * W / sigma(W)`, with its spectral norm sigma and a learned number gamma.

    The product of q and k is bounded by the spectral norms of their weights; with both reparametrised, logits grow only
    as the two gammas do. It works through `torch.nn.utils.parametrize`: the module's `state_dict` holds W, gamma and
    the two singular vectors; `parametrize.remove_parametrizations` leaves a plain weight. Each forward in train mode
    takes `iterations` steps of the power iteration; in eval mode there are none.

    Args:
        module: the owner of the weight, such as nn.Linear; other shapes are taken as (rows, all the rest).
        name: of the weight.
        gamma: its first value, above 0; None: sigma(W), so that the module's output does not change.
        iterations: of the power iteration in each forward, at least 1.

    Returns:
        The module itself.

    Raises:
        InvalidTypeError: It is not a module, or the weight is not floating.
        InvalidValueError: No parameter of two or more dimensions has that name; gamma or iterations are out of range;
            the weight is already reparametrised in this way.

    Example:
        >>> layer = sigma_reparam(nn.Linear(8, 4, dtype=torch.float64), iterations=300)
        >>> round(float(torch.linalg.matrix_norm(layer.weight.detach(), 2)), 3)
        1.0

    Reference:
        Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy Collapse (arXiv:2303.06296).
    """
    if not isinstance(module, nn.Module):
        raise InvalidTypeError(f"module is an nn.Module; got {type(module).__name__}", hint="Pass the layer itself.")
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise InvalidValueError(f"iterations is a number from 1; got {iterations!r}", hint="1 is the usual one.")
    if parametrize.is_parametrized(module, name) and any(
        isinstance(each, SigmaReparam) for each in getattr(module.parametrizations, name)
    ):
        raise InvalidValueError(f"{name} is reparametrised by its spectral norm already", hint="Once is enough.")
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise InvalidValueError(
            f"{name} is a weight of two dimensions or more; got {got}", hint="Name the parameter: 'in_proj_weight'."
        )
    if not weight.is_floating_point():
        raise InvalidTypeError(f"{name} has a floating dtype; got {weight.dtype}", hint="Convert it first.")
    first = None if gamma is None else finite_number("gamma", gamma, above=0.0)
    parametrize.register_parametrization(module, name, SigmaReparam(weight, first, iterations))
    return module


def _matrix(weight: Float[Tensor, "rows ..."]) -> Float[Tensor, "rows columns"]:
    """Return the weight in two dimensions, and in a dtype in which a power iteration converges."""
    return weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))


def entropy_floor(aux: AuxOutput, *, nats: float | None = None, fraction: float | None = None) -> Float[Tensor, ""]:
    r"""Mean over heads of `max(0, floor - H_h)`: a loss term that keeps every head's entropy above a floor.

    `H_h` is the mean entropy of a head's rows, over the batch: in nats, or for each row as a fraction of log n, where n
    is the number of keys that it sees. Rows of fewer than two keys have no choice to make and are left out; a head with
    only such rows adds nothing. At or above the floor the gradient is 0.

    Args:
        aux: of `sqrtdk.attention(..., return_aux=AuxRequest(entropy_nats=True, keys=True))`, (..., Hq, L).
        nats: the floor in nats, above 0; this or `fraction`.
        fraction: the floor as a fraction of log n, above 0, at most 1.

    Returns:
        A number that carries the gradient of the entropy, 0 or more, in nats or as a fraction.

    Raises:
        InvalidTypeError: `aux` is no AuxOutput.
        InvalidValueError: There is not exactly one floor, or it is out of its range; `aux` has no entropy_nats, keys
            or heads.

    Example:
        >>> import sqrtdk
        >>> q = k = v = 9 * torch.eye(4).view(1, 1, 4, 4)
        >>> _, aux = sqrtdk.attention(q, k, v, return_aux=sqrtdk.AuxRequest(entropy_nats=True, keys=True))
        >>> bool(entropy_floor(aux, fraction=0.5) > 0.49)
        True

    Reference:
        Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy Collapse (arXiv:2303.06296),
        on what a low entropy goes with.
    """
    if not isinstance(aux, AuxOutput):
        raise InvalidTypeError(
            f"aux is the AuxOutput of sqrtdk.attention; got {type(aux).__name__}",
            hint="It is the second value returned.",
        )
    if (nats is None) == (fraction is None):
        raise InvalidValueError(
            f"one floor is given, in nats or as a fraction; got nats={nats}, fraction={fraction}", hint="Pass one."
        )
    entropy, keys = aux.entropy_nats, aux.keys
    if entropy is None or keys is None:
        held = [name for name, value in zip(aux._fields, aux, strict=True) if value is not None]
        raise InvalidValueError(
            f"aux has entropy_nats and keys; it has {', '.join(held) or 'neither'}",
            hint="attention(..., return_aux=AuxRequest(entropy_nats=True, keys=True))",
        )
    if entropy.ndim < 2:
        raise InvalidValueError(
            f"entropy has the shape (..., heads, rows); got {tuple(entropy.shape)}", hint="Give q, k and v heads."
        )
    if nats is not None:
        floor = finite_number("nats", nats, above=0.0)
        value = entropy
    else:
        floor = finite_number("fraction", fraction, above=0.0)
        if floor > 1.0:
            raise InvalidValueError(f"fraction is at most 1; got {floor:g}", hint="A floor in nats is `nats`.")
        # log n is the largest entropy of n keys. The clamp only keeps rows of one key, which are left out below, from 0
        # / 0.
        value = entropy / keys.clamp(min=2.0).log()
    # A row of one key has entropy 0 whatever the weights are, and would raise the loss of every causal model.
    choice = keys > 1
    value = torch.where(choice, value, torch.zeros_like(value))
    # The mean is taken per head, so that one collapsed head is not hidden by the others.
    value, rows = (each.movedim(-2, 0).flatten(1).sum(-1) for each in (value, choice.to(value.dtype)))
    mean = value / rows.clamp(min=1.0)
    return torch.where(rows > 0, (floor - mean).clamp(min=0.0), torch.zeros_like(mean)).mean()
