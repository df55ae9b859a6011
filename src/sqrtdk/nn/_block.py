"""A transformer block, pre-norm or post-norm, with the parameters of torch's encoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.nn._multi_head import MultiHeadAttention
from sqrtdk.nn._single import Counted
from sqrtdk.scales._numbers import whole_number
from sqrtdk.stats.request import AuxRequest
from sqrtdk.theory.parameters import Terms

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}


class TransformerBlock(Counted):
    """Self-attention and a network of one hidden layer, each with a residual and a norm.

    With `norm_first`: x + attention(norm1(x)), then x + mlp(norm2(x)); else norm1(x + attention(x)), then
    norm2(x + mlp(x)). Arguments, masks, state_dict and, for the same weights, outputs and gradients are those of
    `torch.nn.TransformerEncoderLayer`; it can stand in a `torch.nn.TransformerEncoder`.

    Args:
        d_model: channels.
        nhead: query heads.
        dim_feedforward: d_ff, channels of the hidden layer.
        dropout: rate on the weights, within the network and on both residual branches, in training only.
        activation: "relu", "gelu" or a function.
        layer_norm_eps: eps of both norms.
        batch_first: inputs are (N, L, d_model); else (L, N, d_model).
        norm_first: norms before attention and network (pre-norm), or after the residual sum (post-norm).
        bias: whether projections, network and norms have biases.
        device: of the parameters.
        dtype: of the parameters.
        **attention: further options of `MultiHeadAttention`: kv_heads, qk_norm, score, scale, position, ...

    Raises:
        InvalidTypeError: An argument has the wrong type.
        InvalidValueError: Sizes do not divide or are below 1, or the activation is unknown.

    Example:
        >>> from sqrtdk.positions import rope
        >>> block = TransformerBlock(64, 4, 256, batch_first=True, norm_first=True, kv_heads=2, position=rope).eval()
        >>> block(torch.randn(2, 10, 64), is_causal=True).shape
        torch.Size([2, 10, 64])
        >>> block.parameter_count() == block.expected_parameters()
        True

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762 (post-norm); Xiong et al. 2020, arXiv:2002.04745 (pre-norm).
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.self_attn = MultiHeadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, **where, **attention
        )
        self.d_ff = whole_number(dim_feedforward, "dim_feedforward", 1)
        self.linear1 = nn.Linear(d_model, self.d_ff, bias=bias, **where)
        self.linear2 = nn.Linear(self.d_ff, d_model, bias=bias, **where)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **where)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **where)
        # Three modules with torch's names, so that hooks and `named_modules` of code for torch's layer find them.
        self.dropout, self.dropout1, self.dropout2 = (nn.Dropout(self.self_attn.dropout) for _ in range(3))
        self.norm_first, self._biased = norm_first, bias
        self.activation = _activation(activation)

    def forward(
        self,
        src: Float[Tensor, "*NL d_model"],
        src_mask: Shaped[Tensor, "L L"] | Shaped[Tensor, "NHq L L"] | Shaped[Tensor, "#N #Hq L L"] | None = None,
        src_key_padding_mask: Shaped[Tensor, "N L"] | Shaped[Tensor, " L"] | None = None,
        is_causal: bool = False,
        *,
        return_aux: AuxRequest | bool | None = None,
    ) -> Any:
        """Run the block.

        Args:
            src: (L, N, d_model), (N, L, d_model) with `batch_first`, or (L, d_model).
            src_mask: as `attn_mask` of `MultiHeadAttention`: bool, **True where the key is hidden from the row**; or
                floating, added.
            src_key_padding_mask: as `key_padding_mask` there: bool, True for padding; or floating, added.
            is_causal: row i sees keys j <= i; a `src_mask` beside it must be this causal mask.
            return_aux: statistics of the attention to return.

        Returns:
            The output, of the input's shape; with `return_aux` a tuple of it and the statistics.
        """
        # The order of torch.nn.TransformerEncoderLayer: norm(x + f(x)), or x + f(norm(x)) with `norm_first`.
        inside = self.norm1(src) if self.norm_first else src
        attended, _, *aux = self.self_attn(
            inside, inside, inside, src_key_padding_mask, False, src_mask, is_causal=is_causal, return_aux=return_aux
        )
        x = src + self.dropout1(attended)
        x = x if self.norm_first else self.norm1(x)
        x = x + self._network(self.norm2(x) if self.norm_first else x)
        x = x if self.norm_first else self.norm2(x)
        return (x, *aux) if aux else x

    def _network(self, x: Float[Tensor, "*NL d_model"]) -> Float[Tensor, "*NL d_model"]:
        changed: Tensor = self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return changed

    def parameter_terms(self) -> Terms:
        """Return the terms of the number of parameters.

        These are the attention's, 2 d_ff d_model of the network, d_model for each norm, and the biases.
        """
        d_model = self.self_attn.embed_dim
        terms = self.self_attn.parameter_terms() + Terms((("2 d_ff d_model", 2 * self.d_ff * d_model),))
        if not self._biased:
            return terms + Terms((("2 d_model", 2 * d_model),))
        # 5 d_model: the bias of linear2, and gain and bias of both norms.
        return terms + Terms((("d_ff", self.d_ff), ("5 d_model", 5 * d_model)))

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows in parentheses: where the norms are."""
        return f"norm_first={self.norm_first}"


def _activation(activation: Any) -> Callable[[Tensor], Tensor]:
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise InvalidValueError(
                f"activation is {' or '.join(ACTIVATIONS)}, or a function; got {activation!r}",
                hint="Pass the function itself, torch.nn.functional.silu for one.",
            )
        return ACTIVATIONS[activation]
    if not callable(activation):
        raise InvalidTypeError(f"activation is a function; got {activation!r}", hint="Pass 'gelu', for one.")
    found: Callable[[Tensor], Tensor] = activation
    return found
