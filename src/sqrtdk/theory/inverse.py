"""Inverses of the entropy: the effective sigma of Gaussian logits, and the scale for a query and a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales._numbers import finite
from sqrtdk.stats._partial import RowStats
from sqrtdk.stats.tiles import attention_row_stats
from sqrtdk.theory._numeric import extended, falling_roots
from sqrtdk.theory._table import table_value
from sqrtdk.theory.gaussian import as_list, keys_of

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import Visible

LARGEST_LOGIT = 1e30  # largest logit that the search visits
WIDEN = 4.0  # factor of the first bracket
DOUBLINGS = 12  # of the logarithm of the bracket's width: beyond any scale that a float holds


def sigma_from_entropy(entropy_nats: float, n: float | Sequence[float]) -> float:
    """Return the effective sigma: the sigma at which Gaussian logits have this expected entropy.

    It solves (1 / R) sum over R rows of H(n_r, sigma) = entropy_nats, with H as in `expected_entropy_nats`, which falls
    with sigma, so that the solution is unique. Found to a relative 1e-12; the table's error in H shifts sigma by up to
    6e-5 H / |dH/dsigma|. Beyond sigma = 64 it follows H ~ 1 / sigma, 2% off at 100 for n = 2^20.

    If logits are not Gaussian or rows differ in variance, it is not an effective sigma, only that of Gaussian logits
    that happen to have the same entropy.

    Args:
        entropy_nats: a mean entropy in nats.
        n: keys of the row, 1 to 2^24, or a list with the keys of each row whose mean entropy this is (a causal call's
            1..L, or a sample of it).

    Returns:
        sigma, natural-log units; 0 at log n and above, infinity at 0 and below, NaN if no row has a choice (n = 1).

    Raises:
        InvalidTypeError: An argument is not a real number (n may also be a list of them).
        InvalidValueError: An argument is NaN, n is out of range, or the list is empty.

    Example:
        >>> from sqrtdk.theory import expected_entropy_nats
        >>> round(sigma_from_entropy(expected_entropy_nats(512, 2.5), 512), 6)
        2.5

    Reference:
        The inverse of `expected_entropy_nats`.
    """
    wanted = extended(entropy_nats, "entropy_nats")
    counts = [keys_of(count) for count in as_list(n, "n")]
    if not counts:
        raise InvalidValueError("n holds at least one row; got an empty list", hint="Leave the head out.")

    def mean(sigma: float) -> float:
        return sum(table_value("entropy", count, sigma) for count in counts) / len(counts)

    if max(counts) <= 1:
        return math.nan
    if wanted <= 0.0:
        return math.inf
    if wanted >= mean(0.0):
        return 0.0
    high = 64.0  # the table's last sigma; beyond it H is taken to be proportional to 1 / sigma, and is inverted as such
    last = mean(high)
    if wanted <= last:
        return high * last / wanted
    return falling_roots(lambda sigmas: [mean(sigmas[0]) - wanted], [0.0], [high])[0]


@overload
def scale_from_entropy(
    query: Float[Tensor, "*B Hq L E"],
    key: Float[Tensor, "*B H S E"],
    entropy_nats: float,
    *,
    is_causal: bool = False,
    visible: Visible | None = None,
    per_head: Literal[False] = False,
) -> float: ...
@overload
def scale_from_entropy(
    query: Float[Tensor, "*B Hq L E"],
    key: Float[Tensor, "*B H S E"],
    entropy_nats: float | Sequence[float],
    *,
    is_causal: bool = False,
    visible: Visible | None = None,
    per_head: Literal[True],
) -> Float[Tensor, " Hq"]: ...
def scale_from_entropy(
    query: Float[Tensor, "*B Hq L E"],
    key: Float[Tensor, "*B H S E"],
    entropy_nats: float | Sequence[float],
    *,
    is_causal: bool = False,
    visible: Visible | None = None,
    per_head: bool = False,
) -> float | Float[Tensor, " Hq"]:
    """Return the positive scale at which the mean row entropy of softmax(scale q k^T) has the requested value.

    There is at most one, since the entropy H of a row falls with the scale s: with x the products and p = softmax(s x),
    H = log sum e^{s x} - s sum p x, and d/ds sum p x = Var_p(x), so that dH/ds = E_p x - E_p x - s Var_p(x) = -s
    Var_p(x). It falls from log n at s = 0 to the log of the number of keys that share the largest product.

    Rows that see fewer than two keys have no choice and are left out of the mean. An additive mask or bias is not
    supported: with one, H need not fall, and s = 0 does not make it log n.

    Args:
        query: (..., Hq, L, E), any floating dtype; half types are computed in float32.
        key: (..., H, S, E), H dividing Hq.
        entropy_nats: the requested mean entropy, in nats; with `per_head` also a sequence with one for each of Hq
            heads.
        is_causal: row i sees keys j <= i.
        visible: bool, broadcastable to (..., Hq, L, S), True where the row sees the key.
        per_head: return one scale for each query head.

    Returns:
        The scale; with `per_head` a tensor (Hq,) in float64. The mean entropy there equals the requested one to about
        1e-6 nats (float32 and half types) or 1e-12 (float64).

    Raises:
        InvalidTypeError: query or key is not a floating tensor, `visible` is not bool, or the entropy is not a number.
        InvalidValueError: The shapes do not fit, no row sees two keys, products are not finite, or no scale gives the
            entropy.

    Example:
        >>> q, k = torch.eye(4).view(1, 1, 4, 4), torch.eye(4).view(1, 1, 4, 4)
        >>> scale = scale_from_entropy(q, k, 1.0)
        >>> p = torch.softmax(scale * q @ k.mT, -1)
        >>> round(torch.special.entr(p).sum(-1).mean().item(), 5)
        1.0

    Reference:
        The derivative above; the search is Anderson and Bjorck's (1973, BIT 13, 253) from a start of
        `sigma_from_entropy`.
    """

    def sweep(scale: float | Float[Tensor, "Hq 1 1"]) -> RowStats:
        return attention_row_stats(query, key, scale=scale, is_causal=is_causal, visible=visible, product=False).rows

    def mean(of: Float[Tensor, "*B Hq L"]) -> Float[Tensor, ""] | Float[Tensor, " Hq"]:
        """Return the mean over the rows with a choice: a number, or one per head."""
        heads = range(of.ndim - 2) if per_head else range(of.ndim)
        dims = [*heads, of.ndim - 1] if per_head else [*heads]
        return torch.where(choice, of.double(), 0.0).sum(dims) / choice.sum(dims)

    first = sweep(1.0)
    choice = first.keys > 1
    uniform = mean(first.keys.double().clamp(min=1.0).log()).reshape(-1).tolist()
    if any(map(math.isnan, uniform)):
        raise InvalidValueError(
            f"{'each head' if per_head else 'the call'} has a row that sees at least two keys; got none",
            hint="Leave out what has no choice: its entropy is 0 at any scale.",
        )
    spread = mean(first.variance).clamp(min=0.0).sqrt().clamp(min=1e-300).reshape(-1).tolist()
    wanted = _wanted(entropy_nats, len(uniform), per_head)

    def excess(logs: Sequence[float]) -> list[float]:
        scales = torch.tensor([math.exp(x) for x in logs], dtype=torch.float64, device=query.device)
        rows = sweep(scales.to(first.max_logit.dtype).view(-1, 1, 1) if per_head else float(scales))
        entropies = mean(rows.entropy_nats).reshape(-1).tolist()
        return [entropy - want for entropy, want in zip(entropies, wanted, strict=True)]

    enough = 1e-12 if first.max_logit.dtype == torch.float64 else 5e-7
    size = float(query.detach().abs().amax().double() * key.detach().abs().amax().double()) * query.shape[-1]
    if not math.isfinite(size) or any(map(math.isnan, spread)):
        raise InvalidValueError("query and key are finite; their products are not", hint="Look for NaN or infinity.")
    top = math.log(LARGEST_LOGIT / size) if size > 0.0 else 0.0
    least = [over + want for over, want in zip(excess([top] * len(wanted)), wanted, strict=True)]
    for want, lowest, highest in zip(wanted, least, uniform, strict=True):
        if not lowest + enough < want < highest - enough:
            raise InvalidValueError(
                f"a positive scale gives a mean entropy between {lowest:.6g} nats (keys that share the largest "
                f"product) and {highest:.6g} (all keys alike); got {want:.6g}",
                hint="Ask for an entropy between the two.",
            )
    guesses = [
        math.log(min(max(sigma_from_entropy(want, math.exp(highest)), 1e-6), 1e6) / std)
        for want, highest, std in zip(wanted, uniform, spread, strict=True)
    ]
    low, high = _bracket(excess, [min(guess, top) for guess in guesses], top)
    found = falling_roots(excess, low, high, enough=enough, limit=80)
    scales = torch.tensor(found, dtype=torch.float64, device=query.device).exp()
    return scales if per_head else float(scales)


def _wanted(entropy_nats: float | Sequence[float], heads: int, per_head: bool) -> list[float]:
    if not per_head or isinstance(entropy_nats, Real):
        return [finite(entropy_nats, "entropy_nats")] * heads
    several: Any = entropy_nats
    listing = as_list(several.tolist() if isinstance(several, Tensor) else several, "entropy_nats")
    wanted = [finite(entropy, "entropy_nats") for entropy in listing]
    if len(wanted) != heads:
        raise InvalidValueError(
            f"entropy_nats is a number or has one for each head; got {len(wanted)} for {heads} heads",
            hint="Pass one number for all heads.",
        )
    return wanted


def _bracket(
    excess: Callable[[Sequence[float]], list[float]], guesses: list[float], top: float
) -> tuple[list[float], list[float]]:
    """Return logarithms of scales below and above the solutions."""
    low, high, step = list(guesses), list(guesses), math.log(WIDEN)
    below, above = excess(low), excess(high)
    for _ in range(DOUBLINGS):
        if all(a >= 0.0 >= b for a, b in zip(below, above, strict=True)):
            break
        low = [x if over >= 0.0 else x - step for x, over in zip(low, below, strict=True)]
        high = [x if over <= 0.0 else min(top, x + step) for x, over in zip(high, above, strict=True)]
        below, above, step = excess(low), excess(high), 2.0 * step
    return low, high
