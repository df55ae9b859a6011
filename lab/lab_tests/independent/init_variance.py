"""Standard deviation of the logits that initialised projections make of normalised inputs.

For independent W_q and W_k with entries of variance v and inputs of squared length d_model, a component of a query has
variance d_model v, and a logit has d_k (d_model v)^2: no matrix is drawn.
"""

import math

D_MODEL, D_K = 768, 64
VARIANCE = {  # of an entry of the matrix
    "Xavier uniform": 2 / (D_MODEL + D_MODEL),
    "Xavier normal": 2 / (D_MODEL + D_MODEL),
    "Xavier packed": 2 / (D_MODEL + 3 * D_MODEL),
    "Xavier, one head": 2 / (D_MODEL + D_K),
    "orthogonal": 1 / D_MODEL,
    "LeCun normal": 1 / D_MODEL,
    "Kaiming normal": 2 / D_MODEL,
    "nn.Linear": 1 / (3 * D_MODEL),
    "N(0, 0.02)": 0.02**2,
}


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    for name, variance in VARIANCE.items():
        component = D_MODEL * variance
        if name == "nn.Linear":  # its bias is uniform as its entries are
            component += variance
        found[f"logit_std; init={name}; case=without"] = (math.sqrt(D_K) * component, 0.0)
        found[f"logit_std; init={name}; case=with the scale"] = (component, 0.0)
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
