"""Every cause that a comparison may name, with what it means; docs/en/diff.md has the same list."""

from __future__ import annotations

from sqrtdk.lab.text import Text

CAUSES = {
    "scale": Text(
        "the factor on the product of q and k is another; a known mistake is named",
        "q 与 k 乘积上的缩放因子不同",
    ),
    "softcap": Text("the softcap is missing on one side, or has another value", "一侧缺少软上限，或取值不同"),
    "softcap_order": Text("the softcap comes before the scale, or after the mask", "软上限放在缩放之前，或掩码之后"),
    "bias_scaled": Text("the bias or the mask is multiplied by the scale", "偏置或掩码被乘上了缩放因子"),
    "mask_offset": Text("the causal mask is off by one key", "因果掩码错开了一个键"),
    "mask_alignment": Text(
        "the causal mask is aligned with the upper left corner on one side, the lower right on the other",
        "因果掩码一侧与左上角对齐，另一侧与右下角对齐",
    ),
    "window": Text("the sliding window has another width, or is on other layers", "滑动窗口宽度不同，或用在别的层"),
    "padding": Text("the padding mask is lost, or pads the other end", "填充掩码丢失，或填充在另一端"),
    "mask_magnitude": Text(
        "hidden keys get a float of another magnitude, so that some weight stays on them",
        "被遮住的键所用的浮点数大小不同，因而仍留有权重",
    ),
    "bias": Text("the position bias is missing, or another", "位置偏置缺失或不同"),
    "rope_missing": Text("q, k or both are not rotated", "q 或 k（或两者）没有旋转"),
    "rope_base": Text("the base of the rotary embedding is another", "旋转位置编码的基数不同"),
    "rope_layout": Text(
        "the channels of a pair are neighbours on one side, half a head apart on the other",
        "成对的通道一侧相邻，另一侧相隔半个头",
    ),
    "rope_partial": Text("another part of the head is rotated", "头中旋转的部分不同"),
    "positions": Text("the positions start elsewhere, or are not reset", "位置的起点不同，或没有重新计数"),
    "length_factor": Text("a factor for long contexts is missing, or another", "长上下文的因子缺失或不同"),
    "qk_norm": Text("q and k are normalised on one side only", "只有一侧对 q 和 k 做了规范化"),
    "qk_norm_order": Text(
        "q and k are normalised before the rotation on one side, after it on the other",
        "q 和 k 的规范化一侧在旋转之前，另一侧在旋转之后",
    ),
    "qk_norm_eps": Text("the epsilon of the normalisation is another", "规范化的 epsilon 不同"),
    "qk_norm_axis": Text(
        "the normalisation runs over all heads on one side, over each head on the other",
        "规范化一侧跨所有头，另一侧逐头进行",
    ),
    "sinks": Text("the learned sinks are missing, or others", "可学习的汇点（sinks）缺失或不同"),
    "group_order": Text(
        "query heads read other key heads: groups are repeated in another order",
        "查询头读取的键头不同：分组重复的顺序不同",
    ),
    "head_order": Text(
        "the heads, or the parts of a fused QKV projection, lie in another order",
        "各头，或融合 QKV 投影的各部分，排列顺序不同",
    ),
    "kv_scale": Text(
        "the scale of a quantised cache is applied twice, or not at all", "量化缓存的缩放用了两次，或没有使用"
    ),
    "rounding": Text(
        "q, k or the weights are rounded to a smaller dtype, or at another place",
        "q、k 或权重被舍入到更低精度，或舍入位置不同",
    ),
    "dropout": Text("dropout runs on one side", "一侧启用了 dropout"),
    "projection_bias": Text("a projection has a bias on one side, or another one", "投影的偏置只有一侧有，或取值不同"),
    "weights": Text("the weights of a projection are not the same; it is named", "某个投影的权重不同，并指出是哪一个"),
    "input": Text("what comes into the attention differs already", "进入注意力的输入已经不同"),
    "unknown": Text("none of these; the stage is named", "不属于以上任何一种；指出所在阶段"),
}
