"""`sqrtdk check --static A B C` judges configs one by one, without weights; the worst gives the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqrtdk._language import Choice
from sqrtdk.cli import options
from sqrtdk.cli.errors import fail
from sqrtdk.cli.process import EXIT_FAILED
from sqrtdk.messages import Message
from sqrtdk.models.options import LoadOptions


def check_each(
    models: Sequence[str], loading: LoadOptions, laws: str | None, fail_on: str, lang: Choice, show_traceback: bool
) -> int:
    """Judge each model, print what is found, and return the worst exit code; an error of one does not stop the others.

    A JSON file without a `model_type` is not a config of a model. It is left out with a message, as a pre-commit hook
    passes every file that fits its pattern.
    """
    from sqrtdk._check import check_with
    from sqrtdk.cli.output import PIPE_WIDTH, announce, colors, print_text, tell_reader, width
    from sqrtdk.errors import SqrtdkError
    from sqrtdk.messages import word
    from sqrtdk.models.config import read_config_dict
    from sqrtdk.models.names import check_name
    from sqrtdk.report.check.terminal import summary_line, to_text
    from sqrtdk.report.console import line
    from sqrtdk.report.plain import plain

    language, codes = options.language_of_choice(lang), {0}
    for model in models:
        try:
            if model.lower().endswith(".json") and "model_type" not in read_config_dict(Path(model)):
                tell_reader(Message("progress.no_model_type", file=plain(model)))
                continue
            check_name(model, loading.revision, announce)
            report = check_with(model, None, loading, laws=laws, fail_on=fail_on)
        except SqrtdkError as error:
            tell_reader(Message("progress.not_checked", file=plain(model)))
            fail(error, show_traceback)
            codes.add(EXIT_FAILED)
            continue
        quiet = len(models) > 1 and not report.exit_code and not report.unjudged
        sentence = plain(model) + word("words.mark.colon", language) + summary_line(report, language)
        wide = len(sentence.encode()) if width() == PIPE_WIDTH else width()  # unwrapped in a log
        print_text(line(sentence, wide) if quiet else to_text(report, width=width(), color=colors(), language=language))
        codes.add(report.exit_code)
    return max(codes)
