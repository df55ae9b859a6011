"""All model types of transformers, eager against `attn_implementation="sqrtdk"`: `python -m tests.hf.sweep`.

Each is built small with random weights, in float64, and compared: output, gradients, left padding, generation with a
dynamic and a static cache, and from one token without a mask. transformers rounds to float32 in places (the softmax of
eager, rotary angles); `Exact` turns these into float64, so that only what is really computed otherwise differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sqrtdk.errors import SqrtdkError
from sqrtdk.integrations import transformers as ours
from tests.hf.small import GENERATING, LENGTH, NotBuiltError, build, inputs_of, small_config, tensors_of

# Half the digits of float64: roundings may grow 7e7-fold on their way through a model; a wrong formula is far above.
TOLERANCE = torch.finfo(torch.float64).eps ** 0.5
TIMEOUT = 240
AGREE = "agree"
WRONG = ("differ", "timed out", "died")  # "timed out" and "died" only where eager alone does not
STATES = (AGREE, "refused", *WRONG, "no attention through the interface", "not built", "does not run in eager")
CHECKS = ("output", "gradients", "left padding", "dynamic cache", "static cache", "one token")


WHOLE = ("AutoModelForSeq2SeqLM", *GENERATING)  # BartForCausalLM is a decoder without its encoder


class Exact(TorchFunctionMode):
    """Float32 in the place of a dtype becomes float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@dataclass
class Outcome:
    """What a model type gave."""

    model_type: str
    state: str
    reason: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    arguments: list[str] = field(default_factory=list)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls that reach `attention_forward`, and the names of their arguments beyond the first five."""
    seen: Counter[str] = Counter()

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen["calls"] += 1
        seen.update(f"{name}=" for name, value in kwargs.items() if value is not None)
        return ours.attention_forward(*args, **kwargs)

    AttentionInterface.register(ours.ATTENTION_NAME, forward)
    try:
        yield seen
    finally:
        AttentionInterface.register(ours.ATTENTION_NAME, ours.attention_forward)


def off(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """`AGREE`, or where they differ most and by how much of their size."""
    if found.keys() != wanted.keys():
        return f"differ: {sorted(found.keys() ^ wanted.keys())[:3]} on one side only"
    worst, where = 0.0, ""
    largest = max(
        (t[torch.isfinite(t)].abs().max().item() for t in wanted.values() if torch.isfinite(t).any()), default=0.0
    )
    for name, expected in wanted.items():
        actual = found[name]
        if actual.shape != expected.shape:
            return f"differ: {name} is {tuple(actual.shape)}, not {tuple(expected.shape)}"
        if not torch.equal(torch.isfinite(actual), torch.isfinite(expected)):
            return f"differ: {name} is finite elsewhere"
        error = (actual - expected).masked_fill(~torch.isfinite(expected), 0.0)
        if error.numel() and error.abs().max().item() > worst:
            worst, where = error.abs().max().item(), name
    return AGREE if worst <= TOLERANCE * largest else f"differ: {worst / largest:.2g} of the largest, in {where}"


def padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """The second row begins with three tokens of padding."""
    mask = inputs["attention_mask"].clone()
    mask[1, :3] = 0
    return inputs | {"attention_mask": mask}


def run_plain(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    with torch.no_grad():
        torch.manual_seed(0)
        return tensors_of(model(**inputs))


def run_padded(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    inputs = padded(inputs)
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        torch.manual_seed(0)
        found = tensors_of(model(**inputs))
    # What is pooled may be pooled from padding, whose rows are no one's.
    return {name: t[seen] for name, t in found.items() if t.shape[:2] == seen.shape}


def run_gradients(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    parts = []
    for output in tensors_of(model(**inputs)).values():
        if output.requires_grad:
            direction = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            parts.append((output * direction).sum())
    if not parts:
        return {}
    sum(parts[1:], parts[0]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def run_from_one_token(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Generate as `generate(ids)` does: no mask is given, and a decoder begins with one token."""
    decoder = not model.config.is_encoder_decoder
    ids = inputs.get("input_ids")
    if ids is not None:
        inputs = {"input_ids": ids[:, :1] if decoder else ids}
    else:
        inputs = {"input_features": inputs["input_features"]}
    found = {}
    for rows in (1, 2):
        few = {name: value[:rows] for name, value in inputs.items()}
        found |= {f"{rows} rows, {name}": value for name, value in run_generate(None)(model, few).items()}
    return found


def run_generate(cache: str | None) -> Callable[[nn.Module, dict[str, Any]], dict[str, Tensor]]:
    def run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
        if "attention_mask" in inputs and "input_ids" in inputs:
            inputs = padded(inputs)
        inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        if model.generation_config.decoder_start_token_id is None:
            model.generation_config.decoder_start_token_id = 0
        torch.manual_seed(0)
        done = model.generate(
            **inputs,
            max_new_tokens=4,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return {"sequences": done.sequences.double()} | {f"step {i}": step for i, step in enumerate(done.logits)}

    return run


def checks_of(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Callable[..., dict[str, Tensor]]]:
    checks: dict[str, Callable[..., dict[str, Tensor]]] = {"output": run_plain, "gradients": run_gradients}
    if "attention_mask" in inputs and inputs["attention_mask"].shape[-1] == LENGTH:
        checks["left padding"] = run_padded
    first = "input_ids" in inputs or "input_features" in inputs
    if first and hasattr(model, "generation_config") and model.can_generate():
        checks |= {"dynamic cache": run_generate(None), "static cache": run_generate("static")}
        checks["one token"] = run_from_one_token
    return checks


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def compare(model_type: str, only: tuple[str, ...] = ()) -> Outcome:
    """Eager against ours, in all checks that eager itself passes, or in those of `only`."""
    ours.register()
    try:
        config = small_config(model_type)
        eager = build(config, "eager", first=WHOLE)
    except NotBuiltError as reason:
        return Outcome(model_type, "not built", str(reason))
    outcome = Outcome(model_type, "")
    try:
        module = build(config, ours.ATTENTION_NAME, first=WHOLE)
    except NotBuiltError as error:
        cause = error.__cause__
        if isinstance(cause, KeyError) and cause.args == (ours.ATTENTION_NAME,):  # its own table of attention classes
            return Outcome(model_type, "no attention through the interface", str(error))
        return Outcome(model_type, "differ", str(error))
    module.load_state_dict(eager.state_dict())
    with Exact(), counted() as seen:
        try:
            inputs = inputs_of(eager)
            run_plain(eager, inputs)
        except Exception as error:
            return Outcome(model_type, "does not run in eager", _line(error))
        for name, run in checks_of(eager, inputs).items():
            if only and name not in only:
                continue
            try:
                wanted = run(eager, inputs)
            except Exception as error:
                outcome.checks[name] = f"eager fails: {_line(error)}"
                continue
            try:
                outcome.checks[name] = off(run(module, inputs), wanted)
            except SqrtdkError as error:
                outcome.checks[name] = f"refused: {_line(error)}"
            except Exception as error:
                outcome.checks[name] = f"differ: raises {_line(error)}"
            if name == "output" and not seen["calls"]:
                return Outcome(model_type, "no attention through the interface", "", outcome.checks)
    outcome.calls = seen.pop("calls", 0)
    outcome.arguments = sorted(name.rstrip("=") for name in seen)
    for state in ("differ", "refused", "agree"):
        reasons = [f"{name}: {text}" for name, text in outcome.checks.items() if text.startswith(state)]
        if reasons:
            outcome.state, outcome.reason = state, "" if state == AGREE else reasons[0]
            break
    return outcome


def eager_alone(model_type: str) -> Outcome:
    """What `compare` does with eager, without ours."""
    eager = build(small_config(model_type), "eager", first=WHOLE)
    with Exact():
        inputs = inputs_of(eager)
        for run in checks_of(eager, inputs).values():
            with contextlib.suppress(Exception):
                run(eager, inputs)
    return Outcome(model_type, AGREE)


def _child(work: Callable[[str], Outcome], model_type: str, end: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        outcome = work(model_type)
    except BaseException as error:
        outcome = Outcome(model_type, "differ", f"the comparison fails: {_line(error)}")
    end.send(asdict(outcome))
    end.close()


def _in_a_process(work: Callable[[str], Outcome], model_type: str, seconds: float) -> Outcome:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(False)
    process = context.Process(target=_child, args=(work, model_type, there))
    process.start()
    there.close()
    try:
        outcome = Outcome(**here.recv()) if here.poll(seconds) else Outcome(model_type, "timed out", f"{seconds} s")
    except EOFError:
        process.join()
        outcome = Outcome(model_type, "died", f"exit code {process.exitcode}")
    process.kill()
    process.join()
    return outcome


def apart(model_type: str, seconds: float = TIMEOUT) -> Outcome:
    """`compare` in a process of its own, which may take some seconds and may die: then eager is asked alone."""
    outcome = _in_a_process(compare, model_type, seconds)
    if outcome.state in ("timed out", "died"):
        alone = _in_a_process(eager_alone, model_type, TIMEOUT)
        if alone.state == outcome.state:
            return Outcome(model_type, "does not run in eager", f"{alone.state}: {alone.reason}")
    return outcome


def tally(outcomes: list[Outcome]) -> str:
    """How many model types are in each state, and of each check how many agree and how many could not be told."""
    states = Counter(outcome.state for outcome in outcomes)
    lines = [f"{len(outcomes)} model types: " + ", ".join(f"{states[state]} {state}" for state in STATES)]
    for name in CHECKS:
        verdicts = Counter(o.checks[name].partition(":")[0] for o in outcomes if name in o.checks)
        parts = [f"{verdicts[verdict]} {verdict}" for verdict in (AGREE, "refused", "differ", "eager fails")]
        lines.append(f"{name}: " + ", ".join(parts))
    return "\n".join(lines)


def main() -> int:
    """Print a line for each type, and what `tally` counts; 1 where one is `WRONG`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--json", help="write the outcomes to this file, one a line")
    options = parser.parse_args()
    outcomes = []
    with open(options.json, "w", encoding="utf-8") if options.json else contextlib.nullcontext() as file:
        for model_type in options.types or list(CONFIG_MAPPING.keys()):
            outcome = apart(model_type)
            outcomes.append(outcome)
            untold = [f"{name}: {text}" for name, text in outcome.checks.items() if text.startswith("eager fails")]
            print(f"{outcome.model_type:32} {outcome.state:12} {'; '.join([outcome.reason, *untold])}", flush=True)
            if file is not None:
                file.write(json.dumps(asdict(outcome)) + "\n")
                file.flush()
    print("\n" + tally(outcomes))
    return int(any(outcome.state in WRONG for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
