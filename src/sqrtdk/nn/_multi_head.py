"""Multi-head attention with the parameters of torch's module; Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk._arguments import dropout_rate
from sqrtdk._guesses import parameters_of, refuse_arguments
from sqrtdk._named import as_bias
from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from sqrtdk.nn._attend import attend, merged_mask, with_extra_keys
from sqrtdk.nn._projections import Projections, new_qk_norm, split_heads
from sqrtdk.nn._single import own_terms, store_attribute
from sqrtdk.positions import PositionTerm, rope
from sqrtdk.stats.request import AuxRequest
from sqrtdk.theory.parameters import Terms

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped
    from typing_extensions import Never

    from sqrtdk._named import AnyScale, AnyScore, AnyWindow

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class MultiHeadAttention(Projections):
    """Multi-head self and cross attention with any score, scale and position.

    If the features are those of `torch.nn.MultiheadAttention`, so are the arguments, the masks, the state_dict and, for
    the same weights, outputs and gradients: one can stand in the other's place.

    Args:
        embed_dim: d_model, channels of the query and of the output.
        num_heads: h, query heads.
        dropout: rate on the weights, in training only.
        bias: whether the projections have biases.
        add_bias_kv: a learned key and value (`bias_k`, `bias_v`) that every row sees, appended to the sequence.
        add_zero_attn: a key and value of zeros that every row sees, appended to the sequence.
        kdim: channels of the key; None: d_model.
        vdim: channels of the value; None: d_model.
        batch_first: inputs are (N, L, d_model); else (L, N, d_model).
        device: of the parameters.
        dtype: of the parameters.
        kv_heads: key and value heads, which divide h; query head i uses head i // (h / kv_heads). None: h.
        head_dim: d_k; None: d_model / h.
        value_head_dim: d_v; None: d_k.
        out_bias: whether the output's projection has a bias; None: as `bias`.
        qk_norm: "rms" or "layer", a norm with learned gains on q and k of each head (`q_norm`, `k_norm`), before the
            rotation; or a function that makes a module for d_k.
        score: a score of `sqrtdk.scores`, its name, or a function of q and k; None: the dot product.
        scale: a number, a rule of `sqrtdk.scales`, its name or a tensor; None: the score's own, 1/sqrt(d_k).
        position: a term of `sqrtdk.positions`, "alibi", or a function that rotates query and key, such as
            `positions.rope`, or "rope".
        softcap: c of c tanh(z / c).
        window: (left, right): row i sees keys i - left to i + right; or in a causal call a number of keys.
        sinks: (h,) logits, or a number, that join the softmax's denominator; a Parameter is learned.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: An argument has the wrong type.
        InvalidValueError: Sizes do not divide or are below 1.
        UnsupportedError: Appended keys, which have no position, are combined with a position or a window.

    Example:
        >>> from sqrtdk.positions import rope
        >>> attend = MultiHeadAttention(512, 8, bias=False, batch_first=True, kv_heads=2, position=rope)
        >>> x = torch.randn(2, 10, 512)
        >>> attend(x, x, x, is_causal=True, need_weights=False)[0].shape
        torch.Size([2, 10, 512])
        >>> attend.parameter_formula, attend.parameter_count() == attend.expected_parameters()
        ('h d_k d_model + 2 kv d_k d_model + d_model^2', True)

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245 (fewer key heads).

    Differs from torch:
        `is_causal` without `attn_mask` is causal; torch raises, or, in evaluation without gradients, drops it. A row
        that sees no key gives 0 before the output's projection; torch gives NaN, or 0 with `need_weights=False` outside
        its fused path. With `add_bias_kv` or `add_zero_attn` a causal row still sees those keys.
    """

    # torch's encoder layers ask for it before their fast path, which would read the weights and skip `forward`
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        out_bias: bool | None = None,
        qk_norm: str | Callable[[int], nn.Module] | None = None,
        score: AnyScore | None = None,
        scale: AnyScale | None = None,
        position: PositionTerm | Rotation | str | None = None,
        softcap: float | None = None,
        window: AnyWindow | None = None,
        sinks: Float[Tensor, " Hq"] | float | None = None,
        impl: str = "auto",
        **_unknown: Never,
    ) -> None:
        if _unknown:
            refuse_arguments(type(self).__name__, _unknown, parameters_of(MultiHeadAttention))
        super().__init__(
            embed_dim,
            num_heads,
            bias=bias,
            add_bias_kv=add_bias_kv,
            kdim=kdim,
            vdim=vdim,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            out_bias=out_bias,
            device=device,
            dtype=dtype,
        )
        if position != "alibi":  # which each call makes, causal or not
            position = rope if position == "rope" else as_bias(position, self.num_heads)
        _check(position, window, add_bias_kv or add_zero_attn)
        self.dropout = dropout_rate("dropout", dropout)
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_norm, self.k_norm = (new_qk_norm(qk_norm, self.head_dim, where) for _ in range(2))
        store_attribute(self, "score", score)
        store_attribute(self, "scale", scale)
        self.position = position
        self.softcap, self.window, self.impl = softcap, window, impl
        store_attribute(self, "sinks", sinks)

    def forward(
        self,
        query: Float[Tensor, "*NL d_model"],
        key: Float[Tensor, "*NS kdim"],
        value: Float[Tensor, "*NS vdim"],
        key_padding_mask: Shaped[Tensor, "N S"] | Shaped[Tensor, " S"] | None = None,
        need_weights: bool = True,
        attn_mask: Shaped[Tensor, "L S"] | Shaped[Tensor, "NHq L S"] | Shaped[Tensor, "#N #Hq L S"] | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        return_aux: AuxRequest | bool | None = None,
        **_unknown: Never,
    ) -> Any:
        """Attend.

        Args:
            query: (L, N, d_model), (N, L, d_model) with `batch_first`, or (L, d_model).
            key: (S, N, kdim), (N, S, kdim) or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) or (S, vdim).
            key_padding_mask: (N, S), or (S,) without a batch: bool, True for padding, which is hidden; or floating,
                added to the logits.
            need_weights: whether to return the weights, which must then be held in memory; without them fused kernels
                run.
            attn_mask: (L, S), (N h, L, S) or (N, h, L, S): bool, **True where the key is hidden from the row**; or
                floating, added. Both masks apply together, whatever their types. `sqrtdk.attention` takes a bool mask
                the other way round, as `scaled_dot_product_attention` does.
            average_attn_weights: return the mean of the weights over heads, (N, L, S); otherwise (N, h, L, S).
            is_causal: row i sees keys j <= i. No mask is needed beside it, and an `attn_mask` beside it must be this
                causal mask (a compiler can't check it: there both apply).
            return_aux: statistics to return, (N, h, L) each; see `sqrtdk.AuxRequest`.

        Returns:
            (output, weights), as torch's module; weights are those after dropout, or None. With `return_aux`
            (output, weights, statistics). Inputs without a batch give results without one.

        Raises:
            InvalidValueError: The shapes do not fit, or `is_causal` stands beside another mask than the causal one.
            InvalidTypeError: A mask has integers.
            UnsupportedError: `need_weights` is combined with an `impl` that never holds them, or appended keys with
                both `is_causal` and `attn_mask`.
        """
        if _unknown:
            refuse_arguments(type(self).__name__, _unknown, parameters_of(MultiHeadAttention.forward))
        batched = self._check_inputs(query, key, value)
        q, k, v = self.project(query, key, value)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = split_heads(q, self.num_heads), split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        q, k, term = self._placed(q, k)
        batch, length, keys = q.shape[0], q.shape[-2], k.shape[-2]
        mask = merged_mask(
            attn_mask,
            key_padding_mask,
            is_causal=is_causal,
            batch=batch,
            heads=self.num_heads,
            length=length,
            keys=keys,
            device=q.device,
        )
        if self.bias_k is not None or self.add_zero_attn:
            _check_hint(is_causal, attn_mask)
            k, v = self._appended(k, v)
            extra = k.shape[-2] - keys
            mask = with_extra_keys(mask, extra, is_causal=is_causal, length=length, keys=keys, device=q.device)
            # The appended keys come last and every row sees them, which is_causal would deny.
            is_causal = False  # the mask has the triangle
        found = attend(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=self.kv_heads != self.num_heads,
            score=self.score,
            softcap=self.softcap,
            bias=term,
            window=self.window,
            sinks=self.sinks,
            need_weights=need_weights,
            return_aux=return_aux,
            impl=self.impl,
        )
        output = self.out_proj(found.output.transpose(1, 2).flatten(2))
        weights, aux = found.weights, found.aux
        if weights is not None and average_attn_weights:
            # torch's module averages over heads by default.
            weights = weights.mean(1)
        if not batched:
            output = output.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
            aux = None if aux is None else type(aux)(*(None if x is None else x.squeeze(0) for x in aux))
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return (output, weights) if aux is None else (output, weights, aux)

    def _check_inputs(
        self, query: Float[Tensor, "*NL d_model"], key: Float[Tensor, "*NS kdim"], value: Float[Tensor, "*NS vdim"]
    ) -> bool:
        """Check that the shapes fit, and return whether there is a batch."""
        named = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        dims = {x.dim() for x, _ in named.values()}
        if dims not in ({2}, {3}) or any(x.is_nested for x, _ in named.values()):
            raise InvalidValueError(
                "query, key and value are dense, all (length, channels) or all with a batch; got "
                + ", ".join(f"{name} of {x.dim()} dimensions" for name, (x, _) in named.items()),
                hint="Add or remove the batch; pad nested tensors and pass key_padding_mask.",
            )
        for name, (x, width) in named.items():
            check_class(name, x)
            if x.shape[-1] != width:
                raise InvalidValueError(
                    f"the {name} has {width} channels; got {tuple(x.shape)}",
                    hint="embed_dim, kdim and vdim are those of query, key and value.",
                )
        if dims == {2}:
            return False
        at = 0 if self.batch_first else 1
        if len({x.shape[at] for x, _ in named.values()}) > 1:
            got = ", ".join(str(tuple(x.shape)) for x, _ in named.values())
            raise InvalidValueError(
                f"query, key and value have one batch, dimension {at} with batch_first={self.batch_first}; got {got}",
                hint="Check batch_first.",
            )
        return True

    def _placed(
        self, query: Float[Tensor, "N Hq L E"], key: Float[Tensor, "N H S E"]
    ) -> tuple[Float[Tensor, "N Hq L E"], Float[Tensor, "N H S E"], PositionTerm | str | None]:
        """Return query and key, normed and rotated, and the position if it is a term or its name."""
        # Norm before rotation, as in Qwen3 and OLMo 2: a gain for each channel does not commute with the rotation.
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        position = self.position
        if position is None or isinstance(position, str):
            return query, key, position
        if isinstance(position, PositionTerm):  # the compiler knows a protocol alone, and not in a union
            return query, key, position
        return *position(query, key), None

    def _appended(
        self, key: Float[Tensor, "N H S E"], value: Float[Tensor, "N H S Ev"]
    ) -> tuple[Float[Tensor, "N H T E"], Float[Tensor, "N H T Ev"]]:
        if self.bias_k is not None and self.bias_v is not None:
            key, value = (
                torch.cat([x, split_heads(bias, self.kv_heads).to(x.dtype).expand(x.shape[0], -1, -1, -1)], -2)
                for x, bias in ((key, self.bias_k), (value, self.bias_v))
            )
        if self.add_zero_attn:
            # One key of zeros with a value of zeros, whose logit is 0: a row may attend to nothing.
            key, value = (functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
        return key, value

    def parameter_terms(self) -> Terms:
        """Return the terms of the number of parameters: the projections, and the parts with parameters of their own."""
        terms = self.projection_terms()
        parts = {"q norm": self.q_norm, "k norm": self.k_norm, "score": self.score, "scale": self.scale}
        for name, part in (parts | {"position": self.position, "sinks": self.sinks}).items():
            terms = terms + own_terms(name, part)
        return terms

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows in parentheses: the sizes and the dropout."""
        few = "" if self.kv_heads == self.num_heads else f", kv_heads={self.kv_heads}"
        return f"{self.embed_dim}, {self.num_heads}{few}, head_dim={self.head_dim}, dropout={self.dropout}"


def _check(position: object, window: object, appended: bool) -> None:
    known = position is None or position == "alibi" or isinstance(position, PositionTerm)
    if not known and not callable(position):
        raise InvalidTypeError(
            f"position is a term of sqrtdk.positions or a function of query and key; got {position!r}",
            hint="positions.alibi(heads) or positions.rope, for one.",
        )
    if appended and (position is not None or window is not None):
        raise UnsupportedError(
            "add_bias_kv and add_zero_attn append keys that have no position; got a position or a window with them",
            hint="Use sinks for a key that every row sees.",
        )


def _check_hint(is_causal: bool, attn_mask: object) -> None:
    """Refuse both beside appended keys: torch shows them to every row with weights, and hides them without."""
    if is_causal and attn_mask is not None:
        raise UnsupportedError(
            "with add_bias_kv or add_zero_attn, is_causal=True and attn_mask leave open who sees the appended keys",
            hint="Pass is_causal=False: attn_mask is enough, and every row sees the appended keys.",
        )
