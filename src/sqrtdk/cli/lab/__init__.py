"""`sqrtdk lab`: the register of claims about sqrt(d_k), each an experiment with a verdict."""

from __future__ import annotations

import typer

from sqrtdk.cli.lab.list import list_claims
from sqrtdk.cli.lab.report import report
from sqrtdk.cli.lab.run import run
from sqrtdk.cli.lab.show import show
from sqrtdk.cli.lab.sweep import sweep
from sqrtdk.cli.verbs import register

lab = typer.Typer(
    name="lab",
    short_help="Measure popular claims about sqrt(d_k), and judge them.",
    help="Claims about sqrt(d_k) as experiments: a control, intervals and a verdict each.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
register(lab, list_claims, "list")
for _verb in (show, run, report, sweep):
    register(lab, _verb)
