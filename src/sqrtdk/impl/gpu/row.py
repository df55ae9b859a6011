"""Statistics of rows: partial sums over keys, their union, and the final results. One number per row.

While a tile is swept, logits are in their own units, x; the logit is `factor * x` with `factor` > 0.

    top         largest x
    rest        sum of e^(z - m) over all visible keys except one that holds the maximum
    c2, c3      the same with the square and cube, times ROOT^2
    a           sum of e^(z - m) (z - m), in log2 units here and in parts
    low         smallest x
    n           visible keys
    mean, m2    of x, and the sum of (x - mean)^2

The key that holds the maximum is left out, because a sum that starts at its 1 would round the others away in a row
close to one-hot. Statistics are compile-time switches: SUMS (all but the plain mass, which is then in `rest`), and in
addition LOW, MOMENTS (with LOW), SPREAD (a), SQUARES, CUBES (with SQUARES).
"""

import triton
import triton.language as tl

from sqrtdk.impl.gpu import wanted as given
from sqrtdk.impl.gpu.arithmetic import INF, LN_2, LOG2_E, NAN, log1p
from sqrtdk.impl.gpu.wanted import BITS

ROOT = tl.constexpr(2.0**50)  # powers of small weights underflow; times its square they do not, down to 1e-34
FAR = tl.constexpr(-1e5)  # 2^FAR is 0; an infinite distance times it would be NaN

# The requested statistics, see `wanted`.
LSE = tl.constexpr(BITS["lse"])
MAX = tl.constexpr(BITS["max_logit"])
MIN = tl.constexpr(BITS["min_logit"])
MEAN = tl.constexpr(BITS["mean"])
VARIANCE = tl.constexpr(BITS["variance"])
ENTROPY = tl.constexpr(BITS["entropy_nats"])
COLLISION = tl.constexpr(BITS["collision"])
PEAK = tl.constexpr(BITS["peak"])
JACOBIAN = tl.constexpr(BITS["jacobian_norm"])
COUNT = tl.constexpr(BITS["keys"])
ROWS = tl.constexpr(given.ROWS)
OWN_TENSORS = tl.constexpr(given.OWN_TENSORS)
# The statistics that need each part of the state.
FOR_SUMS = tl.constexpr(LSE.value | ENTROPY.value | COLLISION.value | PEAK.value | JACOBIAN.value | ROWS.value)
FOR_SPREAD = tl.constexpr(ENTROPY.value | ROWS.value)
FOR_SQUARES = tl.constexpr(COLLISION.value | JACOBIAN.value | ROWS.value)
FOR_CUBES = tl.constexpr(JACOBIAN.value | ROWS.value)
FOR_MOMENTS = tl.constexpr(MEAN.value | VARIANCE.value | ROWS.value)
FOR_LOWEST = tl.constexpr(MIN.value | FOR_MOMENTS.value)


@triton.constexpr_function
def wants(wanted, bits):
    """Return whether any of the statistics in `bits` is among those in `wanted`, both numbers of `wanted.bits_of`."""
    return wanted & bits != 0


@triton.constexpr_function
def plane_of(wanted, bit):
    """Return the index in `planes` of the statistic with the given bit, if `wanted` are the requested ones.

    lse and the entropy have their own tensors, and are not counted.
    """
    return (wanted & (bit - 1) & ~OWN_TENSORS.value).bit_count()


@triton.jit
def empty(BLOCK_M: tl.constexpr):
    """Return the state of BLOCK_M rows that have seen no key, nine float32 tensors (M,).

    They are (top, rest, c2, c3, a, low, n, mean, m2), which the module's docstring explains: `top` is -inf, `low` is
    inf, and the others are 0.
    """
    zero = tl.zeros([BLOCK_M], tl.float32)
    return zero - INF, zero, zero, zero, zero, zero + INF, zero, zero, zero


@triton.jit
def shifted(top, rest, c2, c3, a, larger, unit, SUMS: tl.constexpr, SPREAD: tl.constexpr, SQUARES: tl.constexpr,
            CUBES: tl.constexpr):
    """Convert the sums of rows to a maximum that is at least as large.

    The key that held the old maximum is no longer left out, and joins the sums.

    Kernel arguments:
        top: Old maximum of x.
        rest, c2, c3, a: Sums relative to it.
        larger: New maximum of x.
        unit: log2 e times the factor of x.
        SUMS, SPREAD, SQUARES, CUBES: Which sums are kept.

    Returns:
        (keep, rest, c2, c3, a); `keep` is e^(old - new), the factor for everything weighted by the old maximum.
    """
    distance = (top - tl.where(larger == -INF, 0.0, larger)) * unit
    keep = tl.exp2(distance)
    if SUMS:
        joins = tl.where(larger > top, keep, 0.0)
        if SPREAD:
            a = keep * (a + tl.maximum(distance, FAR) * (1.0 + rest))
        rest = keep * rest + joins
        if SQUARES:
            square = (joins * ROOT) * (joins * ROOT)
            c2 = keep * (keep * c2) + square  # keep^2 may underflow
            if CUBES:
                c3 = keep * (keep * (keep * c3)) + square * joins
    else:
        rest = keep * rest
    return keep, rest, c2, c3, a


@triton.jit
def chan(n, mean, m2, count, centre, squares):
    """Join the moments of two sets of numbers by Chan's rule.

    A second set whose mean is not finite only adds its count.

    Kernel arguments:
        n, mean, m2: Count, mean, and sum of squared deviations from the mean, of the first set.
        count, centre, squares: The same of the second set.

    Returns:
        (n, mean, m2) of both sets together.
    """
    whole = n + count
    there = (tl.abs(centre) < INF) & (count > 0.0)
    share = tl.where(there, count / tl.maximum(whole, 1.0), 0.0)
    half = tl.where(there, centre * 0.5 - mean * 0.5, 0.0)  # halved, as the difference of distant numbers may overflow
    delta = half * 2.0
    m2 = m2 + tl.where(there, squares, 0.0) + delta * (delta * (n * share))
    return whole, mean + half * share + half * share, m2


@triton.jit
def block(x, seen, count, top, rest, c2, c3, a, low, n, mean, m2, unit, MASKED: tl.constexpr, SUMS: tl.constexpr,
          LOWEST: tl.constexpr, MOMENTS: tl.constexpr, SPREAD: tl.constexpr, SQUARES: tl.constexpr,
          CUBES: tl.constexpr, LINEAR: tl.constexpr):
    """Add one more block of keys to the state of rows.

    Kernel arguments:
        x: Logits divided by their factor (see `unit`), float32 (M, N), -inf where a key is not seen.
        seen: Which keys the rows see, bool (M, N); used if MASKED.
        count: Number of keys of the block that each row sees, float32 (M,).
        top, rest, c2, c3, a, low, n, mean, m2: The state, as of `empty`.
        unit: log2 e times the factor of x, (M,).
        LINEAR: Whether x is the plain product, to which no bias was added.

    Returns:
        (weights, keep, and the nine numbers of the new state). The weights are e^(z - m) with the new maximum, (M, N);
        `keep` is the factor, (M,), that converts earlier weights to it.
    """
    largest = tl.max(x, 1)
    larger = tl.maximum(top, largest)
    keep, rest, c2, c3, a = shifted(top, rest, c2, c3, a, larger, unit, SUMS, SPREAD, SQUARES, CUBES)
    shift = tl.where(larger == -INF, 0.0, larger)
    if SUMS:
        distance = (x - shift[:, None]) * unit[:, None]  # exactly 0 at the maximum
        e = tl.exp2(distance)
        others = tl.where(x == larger[:, None], 0.0, e)
        most = tl.sum(others, 1)
        # keys equal to the maximum, except the one that is left out if it came with this block
        again = tl.floor(tl.sum(e, 1) - most + 0.5) - tl.where(larger > top, 1.0, 0.0)
        rest = rest + most + again
        if SPREAD:
            a = a + tl.sum(e * tl.maximum(distance, FAR), 1)
        if SQUARES:
            square = others * (ROOT * ROOT) * others
            c2 = c2 + tl.sum(square, 1) + again * (ROOT * ROOT)
            if CUBES:
                c3 = c3 + tl.sum(square * others, 1) + again * (ROOT * ROOT)
    else:
        if LINEAR:
            e = tl.exp2(x * unit[:, None] - (shift * unit)[:, None])
        else:  # a bias may be the lowest finite number, which times log2 e overflows
            e = tl.exp2((x - shift[:, None]) * unit[:, None])
        rest = rest + tl.sum(e, 1)
    if LOWEST:
        smallest = tl.min(tl.where(seen, x, INF) if MASKED else x, 1)
        low = tl.minimum(low, smallest)
        # relative to the mean so far, so that nothing cancels; in a row's first block, to the middle of its range
        if MOMENTS:
            middle = 0.5 * largest + tl.where(smallest < INF, 0.5 * smallest, 0.0)
            middle = tl.where(n > 0.0, mean, tl.where(tl.abs(middle) < INF, middle, 0.0))
            half = x * 0.5 - (middle * 0.5)[:, None]  # halved, as the difference of distant numbers may overflow
            if MASKED:
                half = tl.where(seen, half, 0.0)
            whole = tl.maximum(n + count, 1.0)
            step = tl.sum(half * (1.0 / whole)[:, None], 1)
            squares = tl.sum(half * half, 1) * 4.0
            finite = (tl.abs(step) < INF) & (count > 0.0)  # a block without a finite mean only adds its count
            squares = tl.where(squares < INF, squares - step * (step * whole) * 4.0, squares)
            mean = tl.where(finite, tl.minimum(tl.maximum(middle + step + step, low), larger), mean)
            m2 = tl.where(finite, m2 + tl.maximum(squares, 0.0), m2)
    return e, keep, larger, rest, c2, c3, a, low, n + count, mean, m2


@triton.jit
def joined(top, rest, c2, c3, a, low, n, mean, m2, other, rest_, c2_, c3_, a_, low_, n_, mean_, m2_,
           SUMS: tl.constexpr, MOMENTS: tl.constexpr, SPREAD: tl.constexpr, SQUARES: tl.constexpr,
           CUBES: tl.constexpr):
    """Join the states of two sets of keys of the same rows, where x is the logit itself.

    Kernel arguments:
        top, rest, c2, c3, a, low, n, mean, m2: State of the first set, as of `empty`.
        other, rest_, c2_, c3_, a_, low_, n_, mean_, m2_: State of the second set; `other` is its maximum.

    Returns:
        (keep, keep of the second set, and the nine numbers of the joined state); `keep` is the factor that converts
        weights of a set to the common maximum.
    """
    larger = tl.maximum(top, other)
    # if both sets hold the maximum, the key of the first set is left out, and the second's joins the rest
    tie = tl.where((top == other) & (top > -INF), 1.0, 0.0)
    keep, rest, c2, c3, a = shifted(top, rest, c2, c3, a, larger, LOG2_E, SUMS, SPREAD, SQUARES, CUBES)
    keep_, rest_, c2_, c3_, a_ = shifted(other, rest_, c2_, c3_, a_, larger, LOG2_E, SUMS, SPREAD, SQUARES, CUBES)
    if not SUMS:
        tie = 0.0
    rest = rest + rest_ + tie
    c2 = c2 + c2_ + tie * (ROOT * ROOT)
    c3 = c3 + c3_ + tie * (ROOT * ROOT)
    if MOMENTS:
        n, mean, m2 = chan(n, mean, m2, n_, mean_, m2_)
    else:
        n = n + n_
    return keep, keep_, larger, rest, c2, c3, a + a_, tl.minimum(low, low_), n, mean, m2


@triton.jit
def finish(top, rest, c2, c3, a, low, n, mean, m2, sink, lse, levels, entropy, planes, plane, at, mask,
           SINKS: tl.constexpr, SUMS: tl.constexpr, WANTED: tl.constexpr):
    """Write the statistics of rows, where x is the logit itself, and return the factor on their weighted values.

    Kernel arguments:
        top, rest, c2, c3, a, low, n, mean, m2: Final state of the rows, as of `empty`.
        sink: Logit of the sink of each row, used if SINKS.
        lse, levels, entropy, planes: Pointers to the results.
        plane: Number of all rows, which is the distance of two planes in elements.
        at: Indices of the rows in a plane.
        mask: Which rows exist, bool; others are not written.
        SUMS: Whether `rest` lacks the key that holds the maximum; otherwise it is the whole mass.
        WANTED: Bits of the requested statistics.

    Returns:
        The factor on the output so far; NaN if a logit was NaN or +inf or all were -inf, 0 if no key was seen.
    """
    bad = (rest != rest) | (top == INF)
    w_top = top
    w_rest = rest
    w_c2 = c2
    w_c3 = c3
    w_a = a
    keep = tl.where(top == -INF, 0.0, 1.0)
    if SINKS:
        zero = tl.zeros_like(top)
        own = zero if SUMS else zero + 1.0
        keep, _, w_top, w_rest, w_c2, w_c3, w_a, _, _, _, _ = joined(
            top, rest, c2, c3, a, low, n, zero, zero, sink, own, zero, zero, zero, sink, zero + 1.0, zero, zero,
            SUMS, False, True, True, True)
    one = 1.0 if SUMS else 0.0
    mass = tl.where(w_top == -INF, 0.0, one + w_rest)
    blind = n == 0.0
    nothing = tl.where(blind, 0.0, NAN)  # for a row without weight
    whole = tl.where(mass == 0.0, 1.0, mass)  # avoids a division by zero, of which the interpreter warns
    share = tl.where(mass == 0.0, nothing, keep / whole)
    share = tl.where(bad, NAN, share)
    more = w_rest if SUMS else w_rest - 1.0
    log_mass = log1p(w_rest) if SUMS else tl.log(whole)
    tl.store(lse + at, tl.where(bad, NAN, tl.where(mass == 0.0, -INF, w_top + log_mass)), mask=mask)
    # apart, as their sum loses the mass in a row that a mask of -3.4e38 hides whole
    tl.store(levels + at, tl.where(bad, NAN, w_top), mask=mask)
    tl.store(levels + plane + at, log_mass, mask=mask)
    if wants(WANTED, ENTROPY):
        value = tl.where(mass == 0.0, nothing, log_mass - w_a * LN_2 / whole)
        tl.store(entropy + at, tl.where(bad, NAN, value), mask=mask)
    sunk = (n > 0.0) & (low == -INF)
    if wants(WANTED, ROWS):
        root = rest * ROOT
        flat = rest == 0.0
        root = tl.where(flat, 1.0, root)
        tl.store(planes + at, n, mask=mask)
        tl.store(planes + plane + at, tl.where(bad, NAN, top), mask=mask)
        tl.store(planes + 2 * plane + at, tl.where(bad, NAN, low), mask=mask)
        tl.store(planes + 3 * plane + at, tl.where(bad, NAN, rest), mask=mask)
        tl.store(planes + 4 * plane + at, tl.where(bad, NAN, c2 / root / root), mask=mask)
        cubes = c3 / root / root / tl.where(flat, 1.0, rest)
        tl.store(planes + 5 * plane + at, tl.where(bad, NAN, cubes), mask=mask)
        tl.store(planes + 6 * plane + at, tl.where(bad, NAN, a * LN_2), mask=mask)
        tl.store(planes + 7 * plane + at, tl.where(bad, NAN, tl.where(sunk, -INF, mean)), mask=mask)
        tl.store(planes + 8 * plane + at, tl.where(bad, NAN, tl.where(sunk, INF, m2)), mask=mask)
    else:
        if wants(WANTED, MAX):
            to = planes + plane_of(WANTED, MAX) * plane
            tl.store(to + at, tl.where(bad, NAN, top), mask=mask)
        if wants(WANTED, MIN):
            to = planes + plane_of(WANTED, MIN) * plane
            tl.store(to + at, tl.where(bad, NAN, low), mask=mask)
        if wants(WANTED, MEAN):
            value = tl.where(blind | bad, NAN, tl.where(sunk, -INF, mean))
            tl.store(planes + plane_of(WANTED, MEAN) * plane + at, value, mask=mask)
        if wants(WANTED, VARIANCE):
            value = tl.where(blind | bad, NAN, tl.where(sunk, INF, m2 / tl.maximum(n, 1.0)))
            tl.store(planes + plane_of(WANTED, VARIANCE) * plane + at, value, mask=mask)
        peak = tl.where(mass == 0.0, nothing, 1.0 / whole)
        if wants(WANTED, COLLISION):
            value = tl.where(mass == 0.0, nothing, (w_c2 * (1.0 / ROOT / ROOT) + 1.0) / whole / whole)
            tl.store(planes + plane_of(WANTED, COLLISION) * plane + at, tl.where(bad, NAN, value), mask=mask)
        if wants(WANTED, PEAK):
            tl.store(planes + plane_of(WANTED, PEAK) * plane + at, tl.where(bad, NAN, peak), mask=mask)
        if wants(WANTED, JACOBIAN):
            root = tl.where(w_rest == 0.0, 1.0, w_rest * ROOT)
            off = more / whole
            squares = w_c2 / root / root  # of the other weights, over off^2
            cubes = w_c3 / root / root / tl.where(w_rest == 0.0, 1.0, w_rest) * off
            flat = squares * off
            inner = peak * peak + squares * (1.0 + 2.0 * peak * peak) + flat * flat - 2.0 * cubes
            value = tl.where(mass == 0.0, nothing, off * tl.sqrt(tl.maximum(inner, 0.0)))
            tl.store(planes + plane_of(WANTED, JACOBIAN) * plane + at, tl.where(bad, NAN, value), mask=mask)
        if wants(WANTED, COUNT):
            tl.store(planes + plane_of(WANTED, COUNT) * plane + at, n, mask=mask)
    return share
