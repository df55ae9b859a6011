"""What an older torch, transformers or Python lacks: the tests that need it are skipped there, with the reason.

`LACKS` has a line for each reason; a test is named by its file and function, or by its case as well. The versions are
the oldest that the core of the tests was seen to pass with (`make versions`). A file that can't even be imported has
`pytest.importorskip("torch", minversion="2.9")` above its imports, and a case of `parametrize` the mark `needs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.support.needs import missing


@dataclass(frozen=True)
class Lack:
    """A package, the version that has it, what it is, and the tests of it."""

    package: str
    version: str
    what: str
    tests: tuple[str, ...]


AUDIT = "tests/audit/test_audit_"
LACKS = (
    Lack("transformers", "5.0", "rope_parameters in a config", (
        f"{AUDIT}declared.py::test_the_rows_of_rope_types_give_what_transformers_computes",
        "tests/laws/test_laws_configured.py::test_tables_are_those_of_transformers",
        "tests/laws/test_laws_first_tokens.py::test_a_number_of_tokens_between_the_two_lengths",
    )),
    Lack("transformers", "5.0", "Mamba without its kernels, and with a cache that it makes itself", (
        "tests/laws/test_laws_cache_hf.py::test_a_state_takes_steps_of_one_token",
        "tests/laws/test_laws_cache_hf.py::test_a_model_without_position_ids_that_needs_them",
    )),
    Lack("transformers", "5.0", "an SDPA that is not causal with a cache and no mask", (
        "tests/laws/test_laws_cache_hf.py::test_masks_that_are_never_made",
    )),
    Lack("transformers", "5.0", "create_causal_mask for OPT", (
        "tests/laws/test_laws_cache_hf.py::test_steps_with_the_mask_of_their_own_tokens",
    )),
    Lack("transformers", "5.0", "registered attention for BERT", tuple(
        f"tests/integrations/test_transformers.py::test_the_hidden_states_are_those_of_eager[{name}-{padded}]"
        for name in ("bert", "roberta") for padded in (False, True)
    )),
    Lack("transformers", "5.0", "SDPA for DETR", (
        f"{AUDIT}runs.py::test_both_leaves_a_convolutional_backbone_alone",
    )),
    Lack("transformers", "5.0", "experts_implementation", (
        f"{AUDIT}check.py::test_static_runs_a_mixture_of_experts_and_leaves_its_config",
    )),
    Lack("transformers", "5.0", "a family that came later", (
        f"{AUDIT}declared.py::test_a_norm_after_the_rotation_takes_the_factor_away",
        f"{AUDIT}declared.py::test_every_family_of_the_tables_exists",
    )),
    Lack("transformers", "4.57", "a family that came later", (
        f"{AUDIT}declared.py::test_llama_ignores_mscale_all_dim_in_the_softmax_and_deepseek_does_not",
        f"{AUDIT}families.py::test_the_tables_are_whole",
        "tests/trace/test_trace_keep_families.py::test_padded[deepseek_v3-eager]",
        f"{AUDIT}masks.py::test_images_of_gemma_3_see_one_another",
        f"{AUDIT}unread.py::test_a_released_norm_that_lost_its_gain",
        f"{AUDIT}verdicts.py::test_a_family_of_transformers_has_a_rule",
        f"{AUDIT}verdicts.py::test_a_users_attention_in_a_family_follows_the_rules_of_its_kind",
    )),
    Lack("transformers", "4.57", "set_attn_implementation", (
        f"{AUDIT}runs.py::test_both_holds_both_runs_eager_first",
        f"{AUDIT}runs.py::test_how_often_the_model_runs",
        f"{AUDIT}runs.py::test_a_finding_of_one_implementation_says_which",
        f"{AUDIT}runs.py::test_an_implementation_that_a_module_cannot_run_is_an_error",
        f"{AUDIT}runs.py::test_a_large_model_is_compared_only_when_asked",
        f"{AUDIT}runs.py::test_an_offloaded_model_is_compared_only_when_asked",
    )),
    # What a check finds there is right: GPT-2 and Gemma 2 lose their scale and softcap in SDPA, Whisper its attribute.
    Lack("transformers", "5.0", "models without a fault of their own", (
        f"{AUDIT}families.py::test_a_variant_is_right",
        f"{AUDIT}families.py::test_a_family_is_right[deepseek_v3-sdpa]",
        f"{AUDIT}families.py::test_a_family_is_right[deepseek_v3-eager]",
        f"{AUDIT}healthy.py::test_nothing_is_said_of_a_right_model_with_fresh_weights",
    )),
    Lack("transformers", "4.57", "a sliding cache that runs, and on the meta device", (
        f"{AUDIT}flags.py::test_bert_as_a_decoder",
        "tests/laws/test_laws_first_tokens.py::test_a_cache_with_a_window_is_not_cut",
        "tests/laws/test_laws_cache_hf.py::test_decoders_keep_the_laws[gemma2-eager-kept-kept]",
        "tests/laws/test_laws_cache_hf.py::test_a_rotation_of_q_alone[gemma2]",
    )),
    Lack("transformers", "4.57", "a static cache", (
        "tests/laws/test_laws_cache_hf.py::test_an_encoder_decoder_decodes_as_it_runs_in_one_pass",
        *(
            f"tests/laws/test_laws_cache_hf.py::test_decoders_keep_the_laws[{case}]"
            for case in (
                "gpt2-sdpa-kept-no self-attention rotates q or k",
                "opt-eager-kept-no self-attention rotates q or k",
                "falcon-sdpa-kept-kept",
                "bart-sdpa-positions are absolute, and forward takes none: tokens move with the padding before them-"
                "forward takes no position_ids",
            )
        ),
        f"{AUDIT}padding.py::test_a_family_hides_the_padding_it_is_given[gemma2]",
        f"{AUDIT}sources.py::test_a_declaration_is_at_its_line_of_the_config",
        f"{AUDIT}sources.py::test_a_field_that_has_its_default_is_at_the_model_type",
    )),
    Lack("torch", "2.11", "a compiler that follows it in one graph", (
        "tests/attention/test_attention_guesses.py::test_a_compiler_reads_the_score_of_a_module",
        "tests/attention/test_attention_kernel_learning.py::test_a_compiled_program_has_the_table_in_one_graph",
        "tests/nn/test_nn_modules.py::test_a_compiled_module_is_the_same",
    )),
    Lack("torch", "2.8", "a compiler that follows it in one graph", (
        "tests/attention/test_attention_alignment.py::test_while_compiling_too",
        "tests/attention/test_attention_kernel.py::test_compiled_by_torch_it_gives_the_same",
        "tests/attention/test_attention_kernel.py::test_exported_with_a_dynamic_length_it_gives_the_same",
        "tests/attention/test_attention_transforms.py::test_compile_without_a_graph_break",
        "tests/attention/test_attention_transforms.py::test_export",
    )),
    Lack("torch", "2.8", "FSDP2 on a CPU, which the two ranks run before", (
        "tests/laws/test_laws_ranks.py::test_a_ring_is_kept_and_a_dropped_window_is_named",
    )),
    Lack("torch", "2.8", "a fused kernel on a CPU that takes a mask of one row", (
        "tests/attention/test_attention_measure.py::test_nothing_large_is_held_without_a_word",
    )),
    Lack("torch", "2.11", "products with sparse and complex weights on a CPU", (
        f"{AUDIT}odd_models.py::test_an_odd_model_is_judged_right[sparse weights, coo]",
        f"{AUDIT}odd_models.py::test_an_odd_model_is_refused_clearly[complex weights]",
        f"{AUDIT}odd_models.py::test_nan_in_a_sparse_weight_is_found",
    )),
)  # fmt: skip


def names(item: str, test: str) -> bool:
    """Whether a test of the table is the collected one, or the function of which that is a case."""
    return item == test or item.startswith(f"{test}[")


def mark_older(items: Iterable[pytest.Item]) -> None:
    """Mark what can't run here to be skipped."""
    here = [(lack, reason) for lack in LACKS if (reason := missing(lack.what, **{lack.package: lack.version}))]
    for item in items if here else ():
        for lack, reason in here:
            if any(names(item.nodeid, test) for test in lack.tests):
                item.add_marker(pytest.mark.skip(reason=reason))
