"""Tracing: records which attentions ran in a model, and the formula of each softmax. Users call `sqrtdk.trace`.

`tape` records operations as they run, `lower` classifies each of them, `readback` walks back from a softmax to the
projections, `probe` reruns parts of the tape on other values, `steps` holds the kinds of steps on the logits, and
`calls` turns a reading into a record. The names that other packages use are re-exported here.
"""

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.tracing.calls.blocks import merge_rows as merge_rows
from sqrtdk.tracing.calls.finish import RowLimit as RowLimit
from sqrtdk.tracing.calls.keep import sketch_of as sketch_of
from sqrtdk.tracing.records import AttentionCall as AttentionCall
from sqrtdk.tracing.records import EffectiveScale as EffectiveScale
from sqrtdk.tracing.records import Factor as Factor
from sqrtdk.tracing.records import Mask as Mask
from sqrtdk.tracing.records import NotAttention as NotAttention
from sqrtdk.tracing.records import NotMeasured as NotMeasured
from sqrtdk.tracing.records import Stage as Stage
from sqrtdk.tracing.tape.places import Sites as Sites
from sqrtdk.tracing.tape.recorder import unseen as unseen
from sqrtdk.tracing.tape.store import ProjectionGradients as ProjectionGradients
from sqrtdk.tracing.tensors import CallRows as CallRows
from sqrtdk.tracing.tensors import CallTensors as CallTensors
from sqrtdk.tracing.tensors import Projection as Projection
from sqrtdk.tracing.tensors import Term as Term
from sqrtdk.tracing.tensors import Vector as Vector
from sqrtdk.tracing.tensors import Waypoint as Waypoint
from sqrtdk.tracing.tensors import some_tokens as some_tokens
from sqrtdk.tracing.trace import Trace as Trace

_says_if_called(__name__)
