"""The shapes of tensors: one letter for one size, in annotations and docstrings, in the notation of jaxtyping.

    *B   batch dimensions, any number           L   queries, the rows of a call or of the block at hand
    N    the one of torch's modules             R   rows of a block, or some of the rows
    Hq   query heads                            S   keys
    H    key heads, which divide Hq             C   keys of a tile, T those from the first that a mask may hide
    Hv   value heads, where they are not H      E   features of a query and a key, the paper's d_k
    *BHq batch and query heads, or neither;     Ek  of a key, where the score lets them differ
         *BH the same of keys                   Ev  of a value
    HqE  heads side by side, before the split   A   of what a score compares, made of query and key

`#` before a letter: or 1, as torch broadcasts. `...` and a bare `Tensor`: whatever its shape. `_`: any size. A word
(`*rows`, `columns`) is a size that the function itself explains.

The names below are shapes that lack their leading dimensions where torch's `scaled_dot_product_attention` lets them.
They, and jaxtyping, are imported by type checkers alone; `tests/shapes` runs the package with every annotation checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

if TYPE_CHECKING:  # what jaxtyping says to type checkers, whose users need not have it
    from typing import Annotated as Bool
    from typing import Annotated as Float
else:
    from jaxtyping import Bool, Float

Query: TypeAlias = Float[Tensor, "*#B #Hq L E"] | Float[Tensor, "L E"]
Key: TypeAlias = Float[Tensor, "*#B #H S E"] | Float[Tensor, "S E"]
AnyKey: TypeAlias = Float[Tensor, "*#B #H S Ek"] | Float[Tensor, "S Ek"]  # before the score
Value: TypeAlias = Float[Tensor, "*#B #Hv S Ev"] | Float[Tensor, "S Ev"]
Output: TypeAlias = Float[Tensor, "*B Hq L Ev"] | Float[Tensor, "L Ev"]

Logits: TypeAlias = Float[Tensor, "*#B #Hq L S"] | Float[Tensor, "L S"]  # or the weights
Rows: TypeAlias = Float[Tensor, "*B Hq L"] | Float[Tensor, " L"]  # one number per row
Visible: TypeAlias = Bool[Tensor, "*#B #Hq #L #S"] | Bool[Tensor, "#L #S"] | Bool[Tensor, "#S"]  # True: sees the key
Bias: TypeAlias = Float[Tensor, "*#B #Hq #L #S"] | Float[Tensor, "#L #S"] | Float[Tensor, "#S"] | Float[Tensor, ""]
Factor: TypeAlias = (  # on the logits of a row
    Float[Tensor, "*#B #Hq #L 1"] | Float[Tensor, "#L 1"] | Float[Tensor, "1"] | Float[Tensor, ""]
)
Sinks: TypeAlias = Float[Tensor, "#Hq"] | Float[Tensor, "*#B #Hq #L 1"] | Float[Tensor, "#L 1"]
