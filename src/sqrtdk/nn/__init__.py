"""Modules built on `sqrtdk.attention`; each has its `parameter_count()` and the formula for it.

The masks of every module follow `torch.nn`: a bool `attn_mask` or `key_padding_mask` is **True where a key is hidden**,
a floating one is added to the logits. `sqrtdk.attention` follows torch's `scaled_dot_product_attention`, in whose mask
True takes part: `~mask` goes from one to the other.
"""

from sqrtdk import _guesses
from sqrtdk.nn._block import TransformerBlock as TransformerBlock
from sqrtdk.nn._inventory import AttentionPart as AttentionPart
from sqrtdk.nn._inventory import attention_parts as attention_parts
from sqrtdk.nn._multi_head import MultiHeadAttention as MultiHeadAttention
from sqrtdk.nn._relative import RelativeAttention as RelativeAttention
from sqrtdk.nn._scores import AdditiveAttention as AdditiveAttention
from sqrtdk.nn._scores import BilinearAttention as BilinearAttention
from sqrtdk.nn._scores import CosineAttention as CosineAttention
from sqrtdk.nn._scores import ScaledDotProductAttention as ScaledDotProductAttention


def __getattr__(name: str) -> None:
    _guesses.no_attribute(__name__, name, globals())
