"""sqrtdk: attention with the right scale, and an audit of every attention that runs in a PyTorch model.

The scale in question is the `1/sqrt(d_k)` of `softmax(q k^T / sqrt(d_k)) v`.
"""

from sqrtdk.trace import trace as trace

__version__ = "0.1.0"
