"""Row statistics of attention logits from query and key, tile by tile: a large call needs no (L, S) matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk._subclasses import as_bool_mask, check_class, named_in_errors
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats._block import Block, Future, Masks, Values, cut, four_dims, pick_rows, statistics_dtype, visible_rows
from sqrtdk.stats._partial import RowStats
from sqrtdk.stats._sweep import Weigher, sweep_tiles

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from sqrtdk._shapes import Bias, Factor, Visible

WIDENED_KEYS = 512  # keys widened to float64 at a time
SCATTER_COST = 0.25  # cost of a multiplication for the scatter matrix, relative to one in a pass


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Results of a pass over the rows of a call, each of shape (..., Hq, L); what was not computed is None."""

    rows: RowStats
    # largest |q . k| over the visible keys, before any scale; 0 if no key is seen
    max_product: Float[Tensor, "*B Hq L"] | None = None
    output: Float[Tensor, "*B Hq L Ev"] | None = None
    future: Float[Tensor, "*B Hq L"] | None = None  # weight on keys j > i, if requested and L == S


@dataclass(frozen=True, slots=True)
class ProductSource:
    """An attention call given by 4-D query and key: its logits are softcap(scale q . k) + bias.

    Masks, bias and a tensor scale have sizes 1 or full.
    """

    query: Float[Tensor, "B Hq L E"]
    key: Float[Tensor, "B H S E"]
    scale: float | Float[Tensor, "#B #Hq #L 1"]
    softcap: float | None
    bias: Float[Tensor, "#B #Hq #L #S"] | None
    masks: Masks
    max_product: Float[Tensor, "B Hq L"] | None = None  # written by `load`
    # see `moments`
    scatter: dict[tuple[int, ...], tuple[Float[Tensor, "B H E 1"], Float[Tensor, "B H E E"]]] = field(
        default_factory=dict, init=False
    )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the logits: (B, Hq, L, S)."""
        batch, heads, length, _ = self.query.shape
        return batch, heads, length, self.key.shape[2]

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.query.shape[1] // max(1, self.key.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tiles and the statistics: float32 or float64."""
        return statistics_dtype(torch.promote_types(self.query.dtype, self.key.dtype))

    @property
    def device(self) -> torch.device:
        """Device of the query."""
        return self.query.device

    @property
    def folds(self) -> bool:
        """Whether the logits are the product times one number, so that the largest product follows from the logits."""
        plain = self.softcap is None and self.bias is None and self.masks.float_mask is None
        return plain and not isinstance(self.scale, Tensor) and self.scale != 0.0 and math.isfinite(self.scale)

    def load(
        self,
        block: Block,
        tile: Float[Tensor, "B Hq R C"],
        scratch: Float[Tensor, "B Hq R C"],
        mask: Float[Tensor, "*#BHq #R T"] | None,
        start: int,
    ) -> None:
        """Write softcap(scale q . k) + bias of a block into `tile`; `TileSource.load` describes the arguments."""
        depth, width, height, keys = block.sizes
        group = self.group
        q = self.query[block.b0 : block.b1, block.h0 : block.h1, block.r0 : block.r1].to(self.dtype)
        if self.folds:
            q = q * self.scale
        k = self.key[block.b0 : block.b1, block.h0 // group : block.h1 // group, block.c0 : block.c1].to(self.dtype)
        pairs = depth * width // group
        torch.bmm(  # autocast leaves operations with out= alone
            q.reshape(pairs, group * height, q.shape[-1]),
            k.reshape(pairs, keys, k.shape[-1]).mT,
            out=tile.view(pairs, group * height, keys),
        )
        if self.folds:
            return
        if self.max_product is not None:
            torch.abs(tile, out=scratch)
            if mask is not None:
                part = scratch[..., start:]
                torch.minimum(part, ((mask - 0.5) * math.inf).clamp_(min=0.0), out=part)  # 0 at hidden keys
                if bool(scratch.isnan().any()):
                    part.masked_fill_(mask == 0, 0.0)
            self.max_product[block.rows] = torch.maximum(self.max_product[block.rows], scratch.amax(-1))
        tile.mul_(cut(self.scale, block) if isinstance(self.scale, Tensor) else self.scale)
        if self.softcap is not None:
            tile.div_(self.softcap).tanh_().mul_(self.softcap)
        for term in (self.bias, self.masks.float_mask):
            if term is not None:
                tile.add_(cut(term, block))

    def moments(self, block: Block) -> tuple[Float[Tensor, "B Hq R"], Float[Tensor, "B Hq R"]] | None:
        """Return mean and squared deviations of the logits of a block, from mean and scatter matrix of its keys.

        They are s q . mean(k) and s^2 q^T (sum (k - mean k)(k - mean k)^T) q, in float64. Both moments of the keys are
        stored for later blocks of rows with the same keys.
        """
        group, width = self.group, self.query.shape[-1]
        rows, keys = group * self.query.shape[-2], block.c1 - block.c0
        if not self.folds or self.dtype == torch.float64 or SCATTER_COST * width**2 * (rows + keys) > rows * keys:
            return None
        at = (block.b0, block.b1, block.h0 // group, block.h1 // group, block.c0, block.c1)
        if at not in self.scatter:
            self.scatter.clear()
            k = self.key[at[0] : at[1], at[2] : at[3], at[4] : at[5]]
            centre = k.mean(-2, keepdim=True, dtype=torch.float64)
            offsets = (part.double() - centre for part in torch.split(k, WIDENED_KEYS, -2))
            self.scatter[at] = centre.mT, torch.stack([part.mT @ part for part in offsets]).sum(0)
        centre, scatter = self.scatter[at]
        q = self.query[block.b0 : block.b1, block.h0 : block.h1, block.r0 : block.r1].double() * self.scale
        depth, heads, rows, _ = q.shape
        q = q.reshape(depth, heads // group, group * rows, width)
        mean, m2 = (q @ centre).squeeze(-1), ((q @ scatter) * q).sum(-1).clamp_(min=0.0)
        return mean.view(depth, heads, rows).to(self.dtype), m2.view(depth, heads, rows).to(self.dtype)

    def sample(self, batch: slice, rows: Int[Tensor, " R"]) -> ProductSource:
        """Return the same call with only some batch elements and some rows, (R,) int64 indices."""
        return replace(
            self,
            query=self.query[batch].index_select(2, rows),
            key=self.key[batch],
            scale=pick_rows(self.scale, batch, rows) if isinstance(self.scale, Tensor) else self.scale,
            bias=None if self.bias is None else pick_rows(self.bias, batch, rows),
            masks=visible_rows(self.masks, batch, rows, self.key.shape[2]),
            max_product=None,
        )


def product_source(
    query: Float[Tensor, "*B Hq L E"],
    key: Float[Tensor, "*B H S E"],
    *,
    scale: float | Factor,
    softcap: float | None = None,
    bias: Bias | None = None,
    visible: Visible | None = None,
    is_causal: bool = False,
    float_mask: Bias | None = None,
) -> ProductSource:
    """Check query, key and what acts on their logits, and return them as the source of a pass.

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E), with Hq a multiple of H.
        scale: Factor on the product; a number, or a tensor that broadcasts to (..., Hq, L, 1).
        softcap: Bound c of the logits, c tanh(z / c); None: none.
        bias: Added to the logits; broadcasts to (..., Hq, L, S).
        visible: Bool mask, True where a key takes part; broadcasts to (..., Hq, L, S).
        is_causal: Whether row i sees keys j <= i only.
        float_mask: Mask that is added, and hides a key by a very negative value.

    Raises:
        InvalidTypeError: An argument is not a tensor, or has another dtype.
        InvalidValueError: The shapes don't fit.
    """
    for name, tensor in (("query", query), ("key", key)):
        check_class(name, tensor)
        if not tensor.is_floating_point():
            raise InvalidTypeError(f"{name} is a floating tensor; got {tensor.dtype}", hint="Pass projected states.")
    q_shape, k_shape = tuple(query.shape), tuple(key.shape)
    if query.ndim != key.ndim or query.ndim < 3 or q_shape[:-3] != k_shape[:-3] or q_shape[-1] != k_shape[-1]:
        raise InvalidValueError(
            f"query is (..., H, L, E) and key (..., Hkv, S, E), alike in ... and E; got {q_shape} and {k_shape}",
            hint="Transpose heads in front of positions, and expand the batch.",
        )
    if (q_shape[-3] % k_shape[-3] if k_shape[-3] else q_shape[-3]) != 0:
        raise InvalidValueError(
            f"the key heads divide the query heads; got {q_shape[-3]} query and {k_shape[-3]} key heads",
            hint="Query heads that share a key head are neighbours.",
        )
    full = (*q_shape[:-1], k_shape[-2])
    visible = as_bool_mask("visible", visible, full[-2], full[-1], query.device)
    return ProductSource(
        query=four_dims(query, q_shape, "query"),
        key=four_dims(key, k_shape, "key"),
        scale=four_dims(scale, (*q_shape[:-1], 1), "scale") if isinstance(scale, Tensor) else float(scale),
        softcap=softcap,
        bias=None if bias is None else four_dims(bias, full, "bias"),
        masks=Masks(
            visible=None if visible is None else four_dims(visible, full, "visible"),
            float_mask=None if float_mask is None else four_dims(float_mask, full, "float_mask"),
            is_causal=is_causal,
        ),
    )


def sweep_product(
    source: ProductSource, value: Float[Tensor, "B H S Ev"] | None = None, *, product: bool = True, future: bool = False
) -> AttentionRows:
    """Compute the statistics of every row of a call, with its output or its weight on future keys.

    Args:
        source: The call.
        value: (B, H, S, Ev) values, if the output of attention is wanted; not together with `future`.
        product: Whether the largest |q . k| before the scale is wanted.
        future: Whether the weight on keys j > i is wanted.
    """
    _, _, length, keys = source.shape
    weigher: Weigher | None = None
    if value is not None:
        weigher = Values(value, source.group)
    elif future and length == keys:
        weigher = Future()
    if product and not source.folds:
        largest = torch.zeros(source.shape[:3], dtype=source.dtype, device=source.device)
        source = replace(source, max_product=largest)
    rows, weighed = sweep_tiles(source, weigher)
    output = weighed.to(value.dtype) if value is not None and weighed is not None else None
    ahead = weighed.squeeze(-1) if value is None and weighed is not None else None
    if product and source.max_product is None:
        assert not isinstance(source.scale, Tensor)
        largest = torch.maximum(rows.max_logit.abs(), rows.min_logit.abs()) / abs(source.scale)
        return AttentionRows(rows, largest.masked_fill(rows.keys == 0, 0.0), output, ahead)
    return AttentionRows(rows, source.max_product, output, ahead)


def attention_row_stats(
    query: Float[Tensor, "*B Hq L E"],
    key: Float[Tensor, "*B H S E"],
    value: Float[Tensor, "*B H S Ev"] | None = None,
    *,
    scale: float | Factor,
    softcap: float | None = None,
    bias: Bias | None = None,
    visible: Visible | None = None,
    is_causal: bool = False,
    float_mask: Bias | None = None,
    product: bool = True,
    future: bool = False,
) -> AttentionRows:
    r"""Return row statistics of `softcap(scale q . k) + bias` over the keys that the masks leave visible.

    Args:
        query: (..., Hq, L, E), any floating dtype; half types are widened to float32 tile by tile.
        key: (..., H, S, E) with H dividing Hq; query head h uses the key head h // (Hq / H).
        value: (..., H, S, Ev), to be weighted in the same pass; None: no output.
        scale: factor on the product; a number, or a tensor broadcastable to (..., Hq, L, 1).
        softcap: c of `c tanh(z / c)`, applied to the scaled product.
        bias: added after the softcap, broadcastable to (..., Hq, L, S).
        visible: bool, broadcastable to (..., Hq, L, S); True where the row sees the key.
        is_causal: row i sees keys j <= i (upper-left, as in SDPA).
        float_mask: added like a bias; its entries at or below -3e4 (-inf, the lowest number of a dtype) hide the key.
        product: also compute the largest |q . k| of each row.
        future: also compute each row's weight on keys j > i, if L == S and there is no value.

    Returns:
        AttentionRows, float64 if query or key is float64, otherwise float32.

    Raises:
        InvalidTypeError: query or key is not a floating tensor, or `visible` is not bool.
        InvalidValueError: The shapes do not fit.

    Example:
        >>> q = k = torch.eye(4).view(1, 1, 4, 4)
        >>> attention_row_stats(q, k, scale=0.5, is_causal=True).rows.keys
        tensor([[[1., 2., 3., 4.]]])
    """
    tensors = {"query": query, "key": key, "value": value, "bias": bias, "visible": visible, "float_mask": float_mask}
    with torch.no_grad(), named_in_errors({**tensors, "scale": scale}):
        source = product_source(
            query,
            key,
            scale=scale,
            softcap=softcap,
            bias=bias,
            visible=visible,
            is_causal=is_causal,
            float_mask=float_mask,
        )
        values = None if value is None else four_dims(value, value.shape, "value")
        result = sweep_product(source, values, product=product, future=future)
        shape = query.shape[:-1]
        return AttentionRows(
            rows=result.rows.map(lambda field: field.reshape(shape)),
            max_product=None if result.max_product is None else result.max_product.reshape(shape),
            output=None if result.output is None else result.output.reshape(*shape, result.output.shape[-1]),
            future=None if result.future is None else result.future.reshape(shape),
        )
