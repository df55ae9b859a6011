"""What each aten operation means to the lineage: literal tables, by operator name without its overload."""

from __future__ import annotations

# Same numbers, another shape or order: replayed on the projection to bring it into the product's layout.
VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "expand",
        "permute",
        "transpose",
        "t",
        "movedim",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "unsqueeze",
        "squeeze",
        "alias",
        "flatten",
        "unflatten",
        "repeat",
        "repeat_interleave",
        "narrow",
        "as_strided",
        "unfold",
        "im2col",
        "diagonal",
        "roll",
        "flip",
        "index_select",
        "index",
        "view_as_real",
        "view_as_complex",
        "_conj",
    }
)

# Same numbers in the same shape: nothing to replay.
SAME = frozenset(
    {
        "_to_copy",
        "clone",
        "detach",
        "contiguous",
        "lift_fresh",
        "native_dropout",
        "_autocast_to_reduced_precision",
        "_autocast_to_full_precision",
        "to",
        "type_as",
    }
)

# Products: (left operand, right operand) by argument position.
CONTRACTIONS = {
    "bmm": (0, 1),
    "mm": (0, 1),
    "baddbmm": (1, 2),
    "addmm": (1, 2),
    "addbmm": (1, 2),
    "dot": (0, 1),
    "mv": (0, 1),
    "addmv": (1, 2),
    "_scaled_mm": (0, 1),
    "_int_mm": (0, 1),
}

# Operations whose output starts a new lineage: what feeds them is not followed.
PROJECTIONS = frozenset(
    {
        "convolution",
        "_convolution",
        "mkldnn_convolution",
        "mkldnn_linear",
        "linear_dynamic",
        "linear_dynamic_fp16",
        "mkldnn_rnn_layer",
        "embedding",
        "_embedding_bag",
        "_weight_int8pack_mm",
        "_weight_int4pack_mm",
        "grid_sampler_2d",
        "lstm",
        "gru",
        "_grouped_mm",
    }
)

# Batch normalisation with fixed statistics: a factor and a shift a channel, learned like the projection before it.
AFFINE = frozenset({"_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm"})

# Writing new keys into a cache: position of what is written.
CACHE_WRITES = {"index_copy": 3, "index_put": 2, "_unsafe_index_put": 2, "slice_scatter": 1}

# Fused attention kernels; their arguments are read by name from the operator's schema.
FUSED = frozenset(
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

# The project's own attention kernels, by their whole names; see `impl/kernel/attention.cpp`, `impl/gpu/operators.py`.
OWN = frozenset({"sqrtdk_cpu::forward", "sqrtdk_gpu::forward"})

# nn.MultiheadAttention's and nn.TransformerEncoderLayer's fast paths.
NATIVE = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})

SOFTMAX = frozenset({"_softmax", "_safe_softmax", "_masked_softmax"})

# New tensors that carry nothing over from their arguments but a shape.
CREATIONS = frozenset(
    {
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
        "empty_strided",
        "bernoulli",
    }
)

NORMS = {
    "native_layer_norm": "layer",
    "layer_norm": "layer",
    "_fused_rms_norm": "rms",
    "rms_norm": "rms",
    "native_group_norm": "group",
}

# Outside of any module, what these give is an input.
RANDOM = frozenset({"randn", "rand", "normal", "uniform", "randint", "randn_like", "rand_like", "randint_like"})

CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "nan_to_num"})
