"""Tracing: which attentions ran in a model, and the formula that reached each softmax."""

from sqrtdk.trace._trace import Trace as Trace
from sqrtdk.trace._trace import trace as trace
from sqrtdk.trace.records import AttentionCall as AttentionCall
from sqrtdk.trace.records import Factor as Factor
from sqrtdk.trace.records import Mask as Mask
from sqrtdk.trace.records import NotAttention as NotAttention
from sqrtdk.trace.records import NotMeasured as NotMeasured
from sqrtdk.trace.records import Scale as Scale
from sqrtdk.trace.records import Stage as Stage
