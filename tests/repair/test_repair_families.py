"""Model types of transformers: each call of a small model, clipped alone, has the maxima that were predicted."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.repair import clip_, plan_of
from sqrtdk.tracing import Trace
from sqrtdk.tracing.tape.stance import fast_path_off
from tests.hf.small import NotBuiltError, build, inputs_of, needs, small_config
from tests.repair.layouts import terms
from tests.tolerances import allowed

# What each shows that the layouts do not.
TYPES = {
    "albert": "one layer, run twice",
    "bart": "across: k of another input",
    "deepseek_v4": "k and v of one norm: refused",
    "diffllama": "two attentions of one projection",
    "gemma4": "v normalised as well",
    "imagegpt": "Conv1D, scaled by the layer",
    "jetmoe": "q of a mixture: refused",
    "modernbert": "windows",
    "qwen3_5": "q with a gate beside it in each head",
    "segformer": "keys at fewer places",
    "t5": "biases: refused, but not across",
}


def _run(model: nn.Module, inputs: dict[str, Any], keep: bool = False) -> Trace:
    torch.manual_seed(0)
    with torch.no_grad(), fast_path_off(), sqrtdk.trace(model, keep=keep, numeric=False) as run:
        model(**inputs)
    return run


def _maxima(run: Trace, number: int) -> Tensor | None:
    stats = run.calls[number].stats
    return None if stats is None else torch.tensor(stats.max_logit, dtype=torch.float64)


def outcomes(model_type: str) -> dict[str, list[int]]:
    """Numbers of the calls that came out as predicted, that were refused, and those that were neither."""
    needs(model_type)
    model = build(small_config(model_type), "eager", torch.float32)
    inputs = inputs_of(model)
    run = _run(model, inputs, keep=True)
    found: dict[str, list[int]] = {"as predicted": [], "refused": [], "wrong": [], "not above 0": []}
    if not run.calls:
        return found
    plans, state = plan_of(model, run), {key: value.clone() for key, value in model.state_dict().items()}
    for number, plan in enumerate(plans):
        if any(bool(torch.isin(plan.groups, earlier.groups).any()) for earlier in plans[:number] if earlier.rows):
            continue  # what it is made from changes as well: an earlier call has its weights
        measured = _maxima(run, number)
        if plan.refused is not None or measured is None:
            found["refused"].append(number)
            continue
        if not bool((measured > 0).any()):
            found["not above 0"].append(number)
            continue
        maxima = [measured if each == number else None for each in range(len(plans))]
        record = clip_(model, plans, maxima, 0.5 * float(measured.max()), 0.3)[number]
        again = _maxima(_run(model, inputs), number)
        assert again is not None
        kept = run.tensors[number]
        long = kept.query.values.shape[-1] + (run.calls[number].model_dim or 0)
        bound = allowed(torch.float32, length=long, logit=0.0, magnitude=terms(kept))
        right = bool(((again - record.predicted).abs().nan_to_num() <= bound).all()) and record.clipped
        found["as predicted" if right else "wrong"].append(number)
        model.load_state_dict(state)
    return found


REFUSED = {"deepseek_v4", "jetmoe"}  # whole
PARTLY = {"t5"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_each_call_has_the_predicted_maxima(model_type: str) -> None:
    found = outcomes(model_type)
    assert not found["wrong"]
    assert bool(found["as predicted"]) is (model_type not in REFUSED)
    assert bool(found["refused"]) is (model_type in REFUSED | PARTLY)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(CONFIG_MAPPING.keys()) - set(TYPES)))
def test_no_model_type_has_others(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = outcomes(model_type)
        except (NotBuiltError, ModelError, RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            if "sqrtdk/repair" in "".join(str(frame) for frame in _frames(error)):
                raise
            pytest.skip(f"does not run: {error}")
    assert not found["wrong"]


def _frames(error: BaseException) -> list[str]:
    import traceback

    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
