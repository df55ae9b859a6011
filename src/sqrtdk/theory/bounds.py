"""Bounds for every row of logits, Gaussian or not: on its entropy, its largest logit, its size."""

from __future__ import annotations

import math

from sqrtdk.errors import InvalidValueError
from sqrtdk.theory._numeric import at_least, extended, whole_count, whole_number


def entropy_lower_bound_nats(n: int, radius: float) -> float:
    """Least entropy of a softmax whose n logits lie within `radius` of their mean, in nats.

    With R the radius, g = R sqrt(n / (n - 1)) and beta = e^{-g}:

        H >= log(1 + (n - 1) beta) + (n - 1) beta g / (1 + (n - 1) beta)

    where (n - 1) g = R sqrt(n (n - 1)). It is attained by one logit g above n - 1 equal ones, the vector that spends
    its length on a single key. The bound holds for every row; it is far below the entropy of a typical one when n is
    large, since R of iid logits grows like sqrt(n).

    Args:
        n: keys of the row, at least 1.
        radius: R, the Euclidean length of the logits less their mean, natural-log units; see `logit_radius`.

    Returns:
        The bound; log n for R = 0, and 0 for a row of one key.

    Raises:
        InvalidTypeError: n is not a whole number, or the radius no number.
        InvalidValueError: n below 1, or a radius that is negative or not finite.

    Example:
        >>> round(entropy_lower_bound_nats(8, 3.0), 4)
        0.9575
        >>> entropy_lower_bound_nats(8, 1e6)
        0.0

    Reference:
        S. Zhai et al. 2023, arXiv:2303.06296, theorem 3.1.

    Differs from:
        The paper, which writes sigma for the product of spectral norms that bounds R, and leaves out the scale.
    """
    radius = at_least(radius, "the radius")
    others = float(whole_count(n, "n") - 1)
    if others == 0:
        return 0.0
    gap = radius * math.sqrt(1.0 + 1.0 / others)
    rest = others * math.exp(-gap)
    return math.log1p(rest) + rest * gap / (1.0 + rest)


def logit_radius(weight_norm: float, input_norm: float, *, scale: float = 1.0) -> float:
    """R = |scale| |W_q^T W_k| |X|^2: how long a row of self-attention's logits can be.

    Row i of scale X W_q^T W_k X^T has the length |scale| |x_i^T W_q^T W_k X^T|, and |x_i| is at most |X|. All norms are
    spectral (the largest singular value). The length about the mean is at most the length.

    Args:
        weight_norm: spectral norm of the product of query and key projections of a head, E_in x E_in.
        input_norm: spectral norm of X, the (L, E_in) inputs of a sequence.
        scale: factor on the product; the paper has 1.

    Returns:
        R, for `entropy_lower_bound_nats`. Not valid with biases in the projections, rotations, norms of q and k, or a
        bias on the logits.

    Raises:
        InvalidTypeError: an argument is not a number.
        InvalidValueError: a negative norm, or a number that is not finite.

    Example:
        >>> entropy_lower_bound_nats(8, logit_radius(2.0, 3.0, scale=0.125)) > 0.9
        True

    Reference:
        S. Zhai et al. 2023, arXiv:2303.06296, theorem 3.1, whose sigma is |W_k W_q^T| |X X^T|.
    """
    weight, inputs = at_least(weight_norm, "weight_norm"), at_least(input_norm, "input_norm")
    return at_least(abs(extended(scale, "the scale")) * weight * inputs * inputs, "the radius")


def max_logit_bounds(lse: float, n: int) -> tuple[float, float]:
    """Bounds on the largest of n logits from their lse = log sum e^z: lse - log n <= max <= lse.

    The lower bound is attained by equal logits; the upper one in the limit of a single large logit. They hold for
    every row whose lse counts these n keys and nothing else, such as a sink.

    Args:
        lse: of the visible keys only (without a sink), natural-log units.
        n: visible keys, at least 1.

    Returns:
        (lower, upper).

    Raises:
        InvalidTypeError: n is not a whole number, or lse no number.
        InvalidValueError: n below 1, or NaN.

    Example:
        >>> max_logit_bounds(math.log(4), 4)
        (0.0, 1.3862943611198906)

    Reference:
        e^max <= sum e^z <= n e^max.
    """
    lse = extended(lse, "lse")
    return lse - math.log(whole_number(n, "n", 1)), lse


def logit_bound(scale: float, query_norm: float, key_norm: float) -> float:
    """|scale q . k| <= |scale| |q| |k| (Cauchy and Schwarz): the largest magnitude of a logit.

    Of Gaussian vectors of dimension d it is about sqrt(d) times the standard deviation of the logits, and reached by
    parallel ones only. A bias or a float mask comes on top.

    Args:
        scale: factor on the product.
        query_norm: Euclidean length of the query, or the largest of several.
        key_norm: the same of the key.

    Returns:
        The bound, natural-log units.

    Raises:
        InvalidTypeError: an argument is not a number.
        InvalidValueError: a negative length, NaN, or 0 times infinity.

    Example:
        >>> logit_bound(0.125, 8.0, 8.0)
        8.0

    Reference:
        The inequality of Cauchy and Schwarz.
    """
    numbers = {"the scale": scale, "query_norm": query_norm, "key_norm": key_norm}
    scale, query, key = (extended(value, name) for name, value in numbers.items())
    if min(query, key) < 0.0:
        raise InvalidValueError(
            f"query_norm and key_norm are at least 0; got {query_norm} and {key_norm}", hint="Pass lengths."
        )
    bound = abs(scale) * query * key
    if math.isnan(bound):
        raise InvalidValueError(
            f"0 times infinity is no bound; got {scale}, {query_norm} and {key_norm}", hint="Look for an overflow."
        )
    return bound
