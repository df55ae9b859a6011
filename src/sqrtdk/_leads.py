"""What people call by another name: methods of reports, arguments of calls, modules taken for functions.

A name from pandas, requests, pytest or a training library is refused with the name that does the same here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn

# attributes of every report
_OF_REPORTS: Mapping[str, str] = {
    **dict.fromkeys(("success", "successful", "is_ok", "healthy", "valid"), "ok"),
    **dict.fromkeys(("show", "display", "pprint", "view"), "print()"),
    **dict.fromkeys(("text", "to_text", "describe", "to_string", "as_text"), "summary()"),
    **dict.fromkeys(("json", "dumps", "as_json"), "to_json()"),
    **dict.fromkeys(("dict", "asdict", "as_dict", "_asdict", "model_dump"), "to_dict()"),
    **dict.fromkeys(("html", "as_html", "page"), "to_html()"),
    **dict.fromkeys(("markdown", "md", "as_markdown"), "to_markdown()"),
    **dict.fromkeys(("df", "to_pandas", "to_df", "dataframe", "to_frame"), "to_dataframe()"),
    "to_csv": "to_dataframe().to_csv(path)",
    **dict.fromkeys(("write", "export", "dump", "to_file", "save_html", "save_json", "savefig"), "save(path)"),
}
# attributes of one kind of report, or of a call
_OF_RECORDS: Mapping[str, Mapping[str, str]] = {
    "CheckReport": {
        **dict.fromkeys(("passed", "failed", "status", "verdict", "result"), "outcome"),
        **dict.fromkeys(("errors", "warnings", "problems", "issues", "failures", "mistakes"), "findings"),
        **dict.fromkeys(
            ("attentions", "layers", "sites", "results", "scales", "scale", "effective_scale", "stats", "entropy"),
            "calls",
        ),
        **dict.fromkeys(("figure", "draw", "heatmap", "visualize"), "plot()"),
        "raise_for_status": "exit_code",
    },
    "DiffReport": {
        **dict.fromkeys(
            ("equal", "equals", "match", "matches", "allclose", "identical", "passed", "different"), "same"
        ),
        **dict.fromkeys(
            ("causes", "cause", "reason", "reasons"), "pairs[i].causes, and module_causes outside attention"
        ),
        **dict.fromkeys(("differences", "diffs", "sites", "layers", "calls"), "pairs"),
        **dict.fromkeys(("findings", "explanation", "message", "sentences"), "paragraphs"),
        **dict.fromkeys(("max_diff", "max_abs_diff", "difference", "error"), "outputs[i].difference"),
    },
    "AnswersReport": {
        **dict.fromkeys(("equal", "match", "matches", "passed"), "same"),
        **dict.fromkeys(("cause", "reasons", "findings"), "causes"),
    },
    "LawReport": {
        **dict.fromkeys(("failed", "violations", "violated", "errors"), "broken"),
        **dict.fromkeys(("passed", "kept", "success"), "ok"),
        **dict.fromkeys(("laws", "results"), "answers"),
        **dict.fromkeys(
            ("to_dict", "to_json", "to_html", "save"), "sqrtdk.check(model, inputs), whose report has the laws"
        ),
        **dict.fromkeys(("print", "summary", "show"), "print(report), and answer.reason of each of answers"),
    },
    "Trace": {
        **dict.fromkeys(("attentions", "results", "sites", "layers", "records", "stats", "scales"), "calls"),
        "formula": "calls[i].formula",
        **dict.fromkeys(("findings", "report", "ok", "summary"), "sqrtdk.check(model, inputs), which judges what ran"),
    },
}
# arguments of calls by what stands in their place
_TO_LOGGERS = "Pass sinks=['tensorboard:runs/tb'] or ['wandb:project'], for one; to='folder' writes Parquet."
_INPUTS = "Pass inputs, a dict or tuple for forward or one tensor."
_NO_TOLERANCE = "It is derived from the dtypes; DiffReport.pairs has the residues and what rounding allows."
OF_CALLS: Mapping[str, Mapping[str, str]] = {
    "watch": {
        **dict.fromkeys(("logger", "loggers", "writer", "wandb", "tensorboard", "callbacks"), _TO_LOGGERS),
        **dict.fromkeys(("log", "log_dir", "logdir", "path", "folder", "out", "output", "save"), "Pass to='folder'."),
        **dict.fromkeys(("interval", "log_every", "every_n_steps", "steps", "freq", "frequency"), "Pass every=n."),
        **dict.fromkeys(("threshold", "thresholds", "alarm", "callback", "on_alert"), "Pass on_alarm, a function."),
        "gradients": "Pass gradient=True.",
    },
    "check": {
        **dict.fromkeys(("input", "x", "args", "kwargs", "batch_inputs", "example_inputs", "sample_inputs"), _INPUTS),
        **dict.fromkeys(("verbose", "quiet", "log"), "The report says it: report.print()."),
        **dict.fromkeys(("attn_implementation", "attn_impl"), "Pass attn='eager' or 'sdpa'."),
        **dict.fromkeys(("strict", "raise_on_error", "threshold", "severity"), "Pass fail_on; report.ok tells."),
        **dict.fromkeys(("html", "json", "output", "path", "to"), "Call report.save(path)."),
        **dict.fromkeys(("length", "max_length", "sequence_length"), "Pass seq_len."),
    },
    "diff": {
        **dict.fromkeys(("input", "x", "args", "example_inputs", "sample_inputs"), _INPUTS),
        **dict.fromkeys(("atol", "rtol", "tol", "tolerance", "eps", "threshold"), _NO_TOLERANCE),
        **dict.fromkeys(("gradients", "grad", "grads"), "Pass backward=True."),
        **dict.fromkeys(("map", "name_map", "names", "renames", "key_mapping"), "Pass mapping."),
        **dict.fromkeys(("html", "json", "output", "path", "to"), "Call report.save(path)."),
    },
    "trace": {
        **dict.fromkeys(("inputs", "input", "x"), "Call the model inside: with sqrtdk.trace(model) as run: model(x)."),
    },
}  # fmt: skip
# modules that people call, and what they mean
_MEANT_BY_CALL: Mapping[str, str] = {
    "answers": "sqrtdk.diff(model, answers.Server(url)), or answers.Function",
    "audit": "sqrtdk.check(model, inputs)",
    "compare": "sqrtdk.diff(a, b, inputs)",
    "laws": "sqrtdk.laws.ask(model, inputs)",
    "monitor": "sqrtdk.watch(model)",
    "positions": "sqrtdk.positions.rope(q, k), .alibi(heads)",
    "recording": "sqrtdk.record(model, inputs, path)",
    "repair": "sqrtdk.fold_scale_(module), qk_clip_ or entropy_floor",
    "report": "report.save(path), .print() or .to_dict() of what sqrtdk.check returned",
    "scales": "sqrtdk.scales.sqrt_dk(), for one",
    "scores": "sqrtdk.scores.dot(), for one",
    "stats": "sqrtdk.measure(q, k), or sqrtdk.stats.row_stats(logits)",
    "testing": "sqrtdk.testing.assert_laws(model, inputs), or assert_gradients",
    "tracing": "sqrtdk.trace(model)",
}


def no_such_attribute(record: object, name: str) -> NoReturn:
    """Raise `AttributeError` for a name that a record does not have, with what does the same.

    Example:
        >>> from sqrtdk.audit.records import CheckReport, ModelInfo
        >>> CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ()).problems
        Traceback (most recent call last):
        AttributeError: CheckReport has no 'problems'; it is findings
    """
    from sqrtdk.errors import did_you_mean

    kind = type(record).__name__
    known = {**(_OF_REPORTS if hasattr(type(record), "save") else {}), **_OF_RECORDS.get(kind, {})}
    if name not in known:
        near = "" if name.startswith("_") else did_you_mean(name, [one for one in dir(type(record)) if one[0] != "_"])
        raise AttributeError(f"{kind} has no {name!r}{near}")
    raise AttributeError(f"{kind} has no {name!r}; it is {known[name]}")


class _Room(ModuleType):
    """A module that says what was meant, if it is called."""

    def __call__(self, *_arguments: object, **_named: object) -> NoReturn:
        from sqrtdk.errors import InvalidTypeError  # a pytest plugin loads this file in every run

        name = self.__name__.rpartition(".")[2]
        raise InvalidTypeError(
            f"{self.__name__} is a module, which can't be called", hint=f"Call {_MEANT_BY_CALL[name]}."
        )


def says_if_called(module: str) -> None:
    """Let a module of `sqrtdk` say what to call in its place, if it is called itself.

    Example:
        >>> import sqrtdk
        >>> sqrtdk.laws(None)
        Traceback (most recent call last):
        sqrtdk.errors.InvalidTypeError: sqrtdk.laws is a module, which can't be called
        Hint: Call sqrtdk.laws.ask(model, inputs).
    """
    sys.modules[module].__class__ = _Room
