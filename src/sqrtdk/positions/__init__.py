"""Positions: terms added to the score or the logits, and rotations of q and k.

A term follows `PositionTerm` and is computed for a block of rows; `content` says whether the scale multiplies it.
"""

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.positions._bias import Alibi as Alibi
from sqrtdk.positions._bias import T5Bias as T5Bias
from sqrtdk.positions._bias import alibi as alibi
from sqrtdk.positions._bias import alibi_slopes as alibi_slopes
from sqrtdk.positions._bias import t5_bias as t5_bias
from sqrtdk.positions._bias import t5_bucket as t5_bucket
from sqrtdk.positions._content import Shaw as Shaw
from sqrtdk.positions._content import TransformerXL as TransformerXL
from sqrtdk.positions._content import shaw as shaw
from sqrtdk.positions._content import transformer_xl as transformer_xl
from sqrtdk.positions._deberta import Deberta as Deberta
from sqrtdk.positions._deberta import deberta as deberta
from sqrtdk.positions._deberta import deberta_bucket as deberta_bucket
from sqrtdk.positions._rope import apply_rope as apply_rope
from sqrtdk.positions._rope import rope as rope
from sqrtdk.positions._rope import rope_frequencies as rope_frequencies
from sqrtdk.positions._rope import rope_tables as rope_tables
from sqrtdk.positions._term import DistanceTerm as DistanceTerm
from sqrtdk.positions._term import PositionTerm as PositionTerm
from sqrtdk.positions._yarn import yarn as yarn
from sqrtdk.positions._yarn import yarn_attention_factor as yarn_attention_factor
from sqrtdk.positions._yarn import yarn_frequencies as yarn_frequencies

POSITIONS = {
    "alibi": alibi,
    "t5_bias": t5_bias,
    "shaw": shaw,
    "transformer_xl": transformer_xl,
    "deberta": deberta,
    "rope": rope,
    "yarn": yarn,
}

_says_if_called(__name__)
