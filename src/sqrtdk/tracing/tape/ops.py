"""Literal tables of what each aten operation means to the lineage, by operator name without its overload.

Below them, names and arguments of one call of an operation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"})
_ORDERS = frozenset({"permute", "transpose", "t", "movedim", "roll", "flip"})
_PIECES = frozenset({"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "diagonal"})
_EXPANDING = frozenset({"expand", "repeat", "repeat_interleave", "unsqueeze", "squeeze", "unfold", "im2col"})
_INDEXING = frozenset({"index_select", "index", "as_strided", "alias"})
_COMPLEX = frozenset({"view_as_real", "view_as_complex", "_conj"})

# Operations that may give heads another order, and those that may cut features into heads.
REORDERING = frozenset({"roll", "flip"}) | _INDEXING - {"alias"}
SPLITTING = RESHAPES | _PIECES

# Same numbers, another shape or order: replayed on the projection to bring it into the product's layout.
VIEWS = RESHAPES | _ORDERS | _PIECES | _EXPANDING | _INDEXING | _COMPLEX

_CASTS = frozenset({"_to_copy", "to", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision"})

# Same numbers in the same shape: nothing to replay.
CASTS_AND_COPIES = _CASTS | {"clone", "detach", "contiguous", "lift_fresh", "native_dropout"}
PASSING = VIEWS | CASTS_AND_COPIES

# Products: (left operand, right operand) by argument position.
CONTRACTIONS = {
    **dict.fromkeys(("bmm", "mm", "dot", "mv", "_scaled_mm", "_int_mm"), (0, 1)),
    **dict.fromkeys(("baddbmm", "addmm", "addbmm", "addmv"), (1, 2)),
}

# Operations whose output starts a new lineage: what feeds them is not followed.
_WITH_KERNELS = frozenset({"convolution", "_convolution", "mkldnn_convolution", "grid_sampler_2d"})
_LOOKUPS = frozenset({"embedding", "_embedding_bag"})
_PACKED_PRODUCTS = frozenset({"mkldnn_linear", "linear_dynamic", "linear_dynamic_fp16", "_grouped_mm"})
INT4_PRODUCTS = {"_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros"}
_QUANTISED = frozenset({"_weight_int8pack_mm", *INT4_PRODUCTS})
_RECURRENT = frozenset({"mkldnn_rnn_layer", "lstm", "gru"})
PROJECTIONS = _WITH_KERNELS | _LOOKUPS | _PACKED_PRODUCTS | _QUANTISED | _RECURRENT

# Batch normalisation with fixed statistics: a factor and a shift a channel, learned like the projection before it.
AFFINE = frozenset({"_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm"})

# Operations that write new keys into a cache, with the position of the new keys: cache.index_copy(1, at, k) is 3.
CACHE_WRITES = {"index_copy": 3, "index_put": 2, "_unsafe_index_put": 2, "slice_scatter": 1}

# Fused attention kernels; their arguments are read by name from the operator's schema.
FUSED_KERNELS = frozenset(
    {
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math_for_mps",
    }
)

# sqrtdk's own attention kernels by qualified name; see `impl/kernel/attention.cpp`, `impl/gpu/operators.py`.
OWN_KERNELS = frozenset({"sqrtdk_cpu::forward", "sqrtdk_gpu::forward"})

# nn.MultiheadAttention's and nn.TransformerEncoderLayer's fast paths.
NATIVE_BLOCKS = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})

SOFTMAX_OPERATIONS = frozenset({"_softmax", "_safe_softmax", "_masked_softmax"})

_RANDOM_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
_NEW_TENSORS = frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "empty_strided"})

# New tensors that take no more than a shape, dtype and device from their arguments.
CREATIONS = _NEW_TENSORS | _RANDOM_LIKE | {"empty_like", "zeros_like", "ones_like", "full_like", "bernoulli"}

NORM_OPERATIONS = {
    **dict.fromkeys(("native_layer_norm", "layer_norm"), "layer"),
    **dict.fromkeys(("_fused_rms_norm", "rms_norm"), "rms"),
    "native_group_norm": "group",
}

# Random tensors; one that is made outside of any module call is an input.
RANDOM = _RANDOM_LIKE | {"randn", "rand", "normal", "uniform", "randint"}

CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "nan_to_num"})


def with_argument(args: Any, place: int, value: Tensor) -> Any:
    """Return the positional arguments with another one at a place."""
    return (*args[:place], value, *args[place + 1 :])


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    given = bound_arguments(func, args, kwargs)
    writes = (arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write)
    return [tensor for name in writes if isinstance(tensor := given.get(name), Tensor)]


def base_name(func: Any) -> str:
    """Return the name of an operator without namespace and overload, "mul" for `aten::mul_.Tensor`.

    The "_" at the end of an in-place operator is left out as well.
    """
    name = str(func._schema.name).split("::")[1]
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def is_on(value: Any) -> bool:
    """Whether an argument is a tensor, or neither None, False nor 0."""
    return isinstance(value, Tensor) or bool(value)


def bound_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments by the names of the operator's schema."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
