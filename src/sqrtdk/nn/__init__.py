"""Modules built on `sqrtdk.attention`; each has its `parameter_count()` and the formula for it."""

from sqrtdk.nn._block import TransformerBlock as TransformerBlock
from sqrtdk.nn._inventory import AttentionPart as AttentionPart
from sqrtdk.nn._inventory import attention_parts as attention_parts
from sqrtdk.nn._multi_head import MultiHeadAttention as MultiHeadAttention
from sqrtdk.nn._relative import RelativeAttention as RelativeAttention
from sqrtdk.nn._scores import AdditiveAttention as AdditiveAttention
from sqrtdk.nn._scores import BilinearAttention as BilinearAttention
from sqrtdk.nn._scores import CosineAttention as CosineAttention
from sqrtdk.nn._scores import ScaledDotProductAttention as ScaledDotProductAttention
