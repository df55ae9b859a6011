"""Changes of a model, one for each known mistake: which of them makes A answer as B does?

A family is a function that returns the edits of one kind for a model: none where the model has no such part. An edit
that has a number says how the number may be varied, so that it can be fitted. A new family is a function and a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sqrtdk.answers import edits_attention, edits_outside, edits_rotation
from sqrtdk.answers.edit import Edit
from sqrtdk.answers.edited import Edited

EDIT_FAMILIES: tuple[Callable[[Edited, int], Iterable[Edit]], ...] = (
    # inside attention
    edits_attention.scales,
    edits_attention.softcaps,
    edits_attention.windows,
    edits_attention.masks,
    edits_attention.sinks,
    edits_attention.group_orders,
    # positions
    edits_rotation.bases,
    edits_rotation.linear_scalings,
    edits_rotation.scaling_laws,
    edits_rotation.no_rotation,
    edits_rotation.layouts,
    edits_rotation.position_tables,
    # outside attention
    edits_outside.epsilons,
    edits_outside.gain_offsets,
    edits_outside.qk_norms,
    edits_outside.activations,
    edits_outside.gates,
    edits_outside.embedding_factors,
    edits_outside.config_multipliers,
    edits_outside.final_caps,
    edits_outside.heads_tied,
    edits_outside.biases,
    edits_outside.swapped_projections,
)


def edits_of(copy: Edited, length: int) -> tuple[Edit, ...]:
    """Return every edit of a model, for prompts of a length in tokens."""
    return tuple(edit for family in EDIT_FAMILIES for edit in family(copy, length))
