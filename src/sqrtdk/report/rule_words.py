"""Titles and help texts of the rules, for readers without our page: what a finding means and what to do."""

from __future__ import annotations

from dataclasses import dataclass

NOT_MEASURED = "not_measured"  # pseudo-rule for sites that no rule could look at and that have no finding


@dataclass(frozen=True, slots=True)
class Words:
    """A short title, and a help text that says what is wrong and what to do."""

    title: str
    help: str


RULES: dict[str, Words] = {
    "nonfinite": Words(
        "NaN or infinity in weights or logits",
        "A parameter or a row of logits is not finite, so no finite answer follows. Find the first module whose output "
        "is not finite; in float16 look at the range of the unscaled product.",
    ),
    "scale_ledger": Words(
        "Attention scale that nothing explains",
        "softmax(scale * q.k) v was run with a scale that is neither 1/sqrt(head_dim) nor declared by the config, the "
        "model's family or an attribute. The message names the mistake where one fits: missing, twice, inverted, "
        "model_dim, head_count, padded_head, length_factor, layer_index, cosine. Correct the scale where the message "
        "says, or declare it in the config if it is meant.",
    ),
    "blocks": Words(
        "Keys of one softmax under unlike scales",
        "Blocks of keys under one softmax were multiplied by unlike scales, so some keys get weight that their content "
        "does not earn. Give every block the same scale.",
    ),
    "declared_vs_actual": Words(
        "Declared scale that the run does not apply",
        "The config or the model's family declares one scale and the run applied another. Apply the declared one: the "
        "weights were trained with it.",
    ),
    "unmeasured": Words(
        "Attention that could not be judged",
        "An attention did not run, was lost on the way to its softmax, or has no scale to judge. What was not judged "
        "is not known to be right: the message says what was seen, and where it was lost.",
    ),
    "softmax_axis": Words(
        "Softmax over another axis than the keys",
        "The weights that a row gives to its values do not sum to 1: the softmax runs over the rows, the heads or the "
        "batch. Take the softmax over the keys, the last axis of q @ k.mT. Slot attention is left alone: it divides by "
        "the sum over the keys afterwards.",
    ),
    "mask_audit": Words(
        "Mask that shows the future, or hides the wrong keys",
        "Rows see keys that they may not see, see none, average masked keys, or put weight on hidden ones. A leak of "
        "the future is critical: the training loss is then worth nothing.",
    ),
    "sliding_window": Words(
        "Sliding window other than the declared one",
        "The layer's mask shows another number of keys than config or module declare. Off by one counts: a row's own "
        "key is part of the window.",
    ),
    "padding": Words(
        "Padding that is seen, or tokens that are hidden as padding",
        "The mask does not fit the padding of the inputs: a token sees padding, or a token is hidden from all others. "
        "Check the direction and the kind (bool or additive) of the mask.",
    ),
    "unused": Words(
        "QK norm, gain or softcap that is built and not used",
        "A normalisation of q and k, a gain or a softcap is in the module or the config, and no call shows it. Call it "
        "where the weights expect it, or remove it.",
    ),
    "dropout": Words(
        "Dropout of attention weights in eval mode",
        "The attention drops weights in evaluation mode, so two runs differ. Pass dropout_p only while training.",
    ),
    "max_logit": Words(
        "Logits that are too large",
        "The largest logit of a head is beyond what stable runs show. Check the scale first; in training, "
        "q/k norm or QK-clip bound it. In a released model it is how the weights are.",
    ),
    "range_forecast": Words(
        "Logits beyond a half-precision type",
        "The unscaled product would overflow float16, or the row offset is beyond the spacing of bfloat16. Scale q "
        "before the product, or keep the logits in float32.",
    ),
    "saturation": Words(
        "Saturated rows",
        "Rows put nearly all weight on one key, and the softmax passes little gradient. Sinks on the first token "
        "are saturated in health; otherwise check the scale.",
    ),
    "entropy": Words(
        "Entropy collapse",
        "Heads have less entropy than rows of Gaussian logits at the critical spread. A level without its trend proves "
        "little: watch it over training.",
    ),
    "flat": Words(
        "Over-flat attention",
        "Rows average their keys whatever the query. Fresh weights are flat by design; trained ones may lack a scale "
        "or a gain.",
    ),
    "responsiveness": Words(
        "Scale attribute that the run does not follow",
        "A module's attribute looks like its scale, and changing it changes nothing. Pass it on to the attention "
        "function, or remove it.",
    ),
    "eager_vs_sdpa": Words(
        "Eager and fused attention that differ",
        "The same weights and inputs give other results through eager and through fused attention. Compare scale, "
        "softcap and mask of the two paths.",
    ),
    "kv_cache": Words(
        "Cache in fewer bits that changes the attention",
        "With k and v stored in the format asked for, rows of a head weigh their keys otherwise, or its output moves. "
        "The message names the cause and what would mend it: a finer scale, a gain folded into q, a norm of q and k.",
    ),
    "law_causal": Words(
        "Later tokens that move earlier outputs",
        "Other tokens were put behind a position, and its output moved, though the model says that it is causal: the "
        "training loss is then worth nothing. Or no output moves with later tokens, though the config says that "
        "attention is bidirectional. Pass the mask that was declared to the attention that the message names.",
    ),
    "law_samples": Words(
        "Samples of a batch that see one another",
        "The other samples of the batch were changed, and the outputs of this one moved. Look for batch_first, for a "
        "view that mixes the batch with heads or positions, and for a mask that is tiled over heads.",
    ),
    "law_padding": Words(
        "Padding that moves outputs, or a mask that changes nothing",
        "What stands at the positions that a mask hides was changed, and other outputs moved; or the mask was flipped, "
        "and nothing moved. Pass the mask to the attention, as -inf over the keys that it hides.",
    ),
    "law_documents": Words(
        "Packed documents that see one another",
        "Where position_ids restart another document begins, and what the first one holds moved outputs of the others. "
        "Hide the keys of other documents beside the causal mask.",
    ),
    "law_left_padding": Words(
        "Padding on the left that gives other outputs",
        "The padding was moved from the right to the left, and outputs at real positions moved. Count the positions "
        "from the first real token, and hide the keys of the padding.",
    ),
    "law_cache": Words(
        "Decoding with a cache that differs from one pass",
        "The tokens were run in steps, with the keys and values of earlier steps cached, and the outputs differ from "
        "those of one pass. Align the causal mask with the last key, and count positions from the length of the cache.",
    ),
    "law_shift": Words(
        "Relative positions that depend on where they begin",
        "All positions were moved by a constant, and the outputs moved. Rotate q and k alike, once, by the positions "
        "that were given.",
    ),
    "law_place": Words(
        "Tokens or heads that change places",
        "One token was changed, and q, k or v of another moved; or the value of a key went to another row. Split heads "
        "by view(B, L, H, E).transpose(1, 2), and merge them by transpose(1, 2).reshape(B, L, H * E).",
    ),
    "law_configured": Words(
        "Rotation other than the config's",
        "What the run applies, read from its values, is not what a field of the config says: the base of the rotation, "
        "its share of channels, its scaling law. Pass the field on to the layer.",
    ),
    "law_parameters": Words(
        "Parameters of an attention without a part",
        "A parameter that the attention holds was changed, and its output did not move. Append sinks to the logits as "
        "one more key: a number that is added to every logit of a head cancels in the softmax. Pass it on, or remove "
        "it.",
    ),
    "law_modes": Words(
        "Outputs that depend on how the model is run",
        "A sample gives other outputs alone than in a batch: look for what counts over the whole batch. Or train mode, "
        "with every dropout off, gives other outputs than eval mode: look for a mask, a scale or a norm in one branch "
        "of if self.training.",
    ),
    NOT_MEASURED: Words(
        "Check that was not made",
        "A check could not be made on this model with these inputs; the message says why.",
    ),
}


def words(rule: str) -> Words:
    """Return the words of a rule; a rule without words is described by its name.

    Example:
        >>> words("max_logit").title, words("another").title
        ('Logits that are too large', 'another')
    """
    return RULES.get(rule) or Words(rule, rule)
