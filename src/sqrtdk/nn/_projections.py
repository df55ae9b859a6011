"""The parameters of multi-head attention by the names and shapes of `torch.nn.MultiheadAttention`.

The norms of q and k act on each head, with one learned gain each, as in Qwen3, Gemma 3 and ViT-22B (arXiv:2302.05442).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.nn._single import Counted
from sqrtdk.scales._numbers import whole_number
from sqrtdk.theory.parameters import Terms, multi_head_terms

if TYPE_CHECKING:
    from jaxtyping import Float


class Projections(Counted):
    """Projections of query, key, value and output; the arguments are those of `MultiHeadAttention`.

    Attributes:
        in_proj_weight: (h d_k + kv d_k + kv d_v, d_model); None if key or value have other channels than d_model.
        q_proj_weight: (h d_k, d_model) in that case, else None.
        k_proj_weight: (kv d_k, kdim) in that case, else None.
        v_proj_weight: (kv d_v, vdim) in that case, else None.
        in_proj_bias: (h d_k + kv d_k + kv d_v,) or None.
        bias_k: (1, 1, kv d_k) or None, a key that is appended.
        bias_v: (1, 1, kv d_v) or None, its value.
        out_proj: h d_v to d_model.
    """

    in_proj_weight: Float[Tensor, "HqE+HE+HEv d_model"] | None
    q_proj_weight: Float[Tensor, "HqE d_model"] | None
    k_proj_weight: Float[Tensor, "HE kdim"] | None
    v_proj_weight: Float[Tensor, "HEv vdim"] | None
    in_proj_bias: Float[Tensor, " HqE+HE+HEv"] | None
    bias_k: Float[Tensor, "1 1 HE"] | None
    bias_v: Float[Tensor, "1 1 HEv"] | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool,
        add_bias_kv: bool,
        kdim: int | None,
        vdim: int | None,
        kv_heads: int | None,
        head_dim: int | None,
        value_head_dim: int | None,
        out_bias: bool | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.embed_dim = whole_number(embed_dim, "embed_dim", 1)
        self.num_heads = whole_number(num_heads, "num_heads", 1)
        self.kv_heads = self.num_heads if kv_heads is None else whole_number(kv_heads, "kv_heads", 1)
        self.kdim = self.embed_dim if kdim is None else whole_number(kdim, "kdim", 1)
        self.vdim = self.embed_dim if vdim is None else whole_number(vdim, "vdim", 1)
        self._check_heads(head_dim)
        self.head_dim = self.embed_dim // self.num_heads if head_dim is None else whole_number(head_dim, "head_dim", 1)
        self.value_head_dim = (
            self.head_dim if value_head_dim is None else whole_number(value_head_dim, "value_head_dim", 1)
        )
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        q, k, v = self._widths = [
            self.num_heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.value_head_dim,
        ]
        # torch's module has one packed weight only if q, k and v read the same channels; the state_dict has its names.
        packed = self.kdim == self.vdim == self.embed_dim
        self._new("in_proj_weight", packed, (q + k + v, self.embed_dim), where)
        self._new("q_proj_weight", not packed, (q, self.embed_dim), where)
        self._new("k_proj_weight", not packed, (k, self.kdim), where)
        self._new("v_proj_weight", not packed, (v, self.vdim), where)
        self._new("in_proj_bias", bias, (q + k + v,), where)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(self.num_heads * self.value_head_dim, self.embed_dim, bias=out_bias, **where)
        self._new("bias_k", add_bias_kv, (1, 1, k), where)
        self._new("bias_v", add_bias_kv, (1, 1, v), where)
        self.reset_parameters()

    def _check_heads(self, head_dim: object) -> None:
        if head_dim is None and self.embed_dim % self.num_heads:
            raise InvalidValueError(
                f"num_heads divides embed_dim; got {self.num_heads} heads and embed_dim {self.embed_dim}",
                hint="Choose another number of heads, or give head_dim.",
            )
        if self.num_heads % self.kv_heads:
            raise InvalidValueError(
                f"kv_heads divides num_heads; got {self.kv_heads} and {self.num_heads}",
                hint="Each key head serves the same number of query heads.",
            )

    def _new(self, name: str, wanted: bool, shape: tuple[int, ...], where: dict[str, Any]) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **where)) if wanted else None)

    def reset_parameters(self) -> None:
        """Initialise: Glorot's uniform for the input projections, 0 for biases, Glorot's normal for `bias_k` and
        `bias_v`.

        The order is that of torch's module, so that one seed gives both the same parameters.
        """
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                # As torch initialises its module: the packed weight as one matrix.
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for appended in (self.bias_k, self.bias_v):
            if appended is not None:
                nn.init.xavier_normal_(appended)

    def project(
        self, query: Float[Tensor, "*NL d_model"], key: Float[Tensor, "*NS kdim"], value: Float[Tensor, "*NS vdim"]
    ) -> tuple[Float[Tensor, "*NL HqE"], Float[Tensor, "*NS HE"], Float[Tensor, "*NS HEv"]]:
        """Return the projections q, k and v, with their heads side by side.

        For self-attention with torch's packed weight, they come from a single product.
        """
        if self.in_proj_weight is not None:
            # By identity, not by value: comparing the numbers would cost more than two further products.
            if query is key and key is value:
                q, k, v = torch.split(
                    functional.linear(query, self.in_proj_weight, self.in_proj_bias), self._widths, -1
                )
                return q, k, v
            weights = list(torch.split(self.in_proj_weight, self._widths))
        else:
            weights = [w for w in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if w is not None]
        biases = [None] * 3 if self.in_proj_bias is None else torch.split(self.in_proj_bias, self._widths)
        q, k, v = map(functional.linear, (query, key, value), weights, biases)
        return q, k, v

    def projection_terms(self) -> Terms:
        """Return the terms of the number of parameters: h d_k d_model + kv d_k kdim + kv d_v vdim + h d_v d_model, and
        biases.
        """
        terms = multi_head_terms(
            self.embed_dim,
            self.num_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            kdim=self.kdim,
            vdim=self.vdim,
            in_bias=self.in_proj_bias is not None,
            out_bias=self.out_proj.bias is not None,
        )
        if self.bias_k is None:
            return terms
        text = "2 kv d_k" if self.value_head_dim == self.head_dim else "kv d_k + kv d_v"
        return terms + Terms(((text, self.kv_heads * (self.head_dim + self.value_head_dim)),))


def split_heads(x: Float[Tensor, "N L HE"], heads: int) -> Float[Tensor, "N {heads} L E"]:
    """Return a view in which heads that lie side by side have a dimension of their own.

    Example:
        >>> split_heads(torch.zeros(2, 5, 32), 4).shape
        torch.Size([2, 4, 5, 8])
    """
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


class HeadRMSNorm(nn.RMSNorm):
    """torch's RMSNorm, with the gain cast to the input's dtype.

    Without the cast, torch warns of two dtypes in autocast.
    """

    def forward(self, x: Float[Tensor, "*B E"]) -> Float[Tensor, "*B E"]:
        """Return g x / sqrt(mean(x^2) + eps) over the last dimension, in the dtype of x; g is the gain."""
        weight = self.weight.to(x.dtype)
        return functional.rms_norm(x, list(self.normalized_shape), weight, self.eps)


# 1e-6: the eps of Llama's and Qwen's RMSNorm; that of torch's LayerNorm is 1e-5.
QK_NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": lambda width, **where: HeadRMSNorm(width, eps=1e-6, **where),
    "layer": lambda width, **where: nn.LayerNorm(width, bias=False, **where),
}


def new_qk_norm(norm: Any, width: int, where: dict[str, Any]) -> nn.Module | None:
    """Return a norm for the q or k of each head.

    Args:
        norm: A name in `QK_NORMS`, a function that makes a module for a width, or None for no norm.
        width: Number of channels of a head.
        where: Device and dtype of the norm's parameters.

    Raises:
        InvalidValueError: The name is unknown.
    """
    if norm is None:
        return None
    if isinstance(norm, str):
        if norm not in QK_NORMS:
            raise InvalidValueError(
                f"qk_norm is one of {', '.join(QK_NORMS)}; got {norm!r}",
                hint="For l2 use score=scores.cosine(), whose gain is the scale.",
            )
        return QK_NORMS[norm](width, **where)
    made = norm(width)
    if not isinstance(made, nn.Module):
        raise InvalidTypeError(
            f"qk_norm makes a module for a head dimension; got {type(made).__name__}", hint="Pass nn.RMSNorm, for one."
        )
    return made
