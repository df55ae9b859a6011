"""What q . k / sqrt(d) shares with q . k / (|q| |k|), for N(0, 1) components, in closed form.

Lengths and directions are independent, and the squared cosine is Beta(1/2, (d - 1)/2), with the mean 1/d. So the
covariance of the two quotients is E|q||k| / sqrt(d) / d, and their deviations are 1 and 1/sqrt(d).
"""

import math


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    for d in (16, 64, 256, 1024):
        norms = 2 * math.exp(2 * (math.lgamma((d + 1) / 2) - math.lgamma(d / 2)))  # (E|q|)^2
        found |= {
            f"product_of_norms; d_k={d}": (norms, 0.0),
            f"norms_over_root_d; d_k={d}": (norms / math.sqrt(d), 0.0),
            f"correlation; d_k={d}": (norms / d, 0.0),
            f"deviation; divided_by=1; d_k={d}": (math.sqrt(d), 0.0),
            f"deviation; divided_by=root_d; d_k={d}": (1.0, 0.0),
            f"deviation; divided_by=norms; d_k={d}": (1 / math.sqrt(d), 0.0),
        }
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
