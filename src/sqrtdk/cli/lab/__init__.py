"""`sqrtdk lab`: the register of claims about sqrt(d_k), each an experiment with a verdict."""

from __future__ import annotations

from sqrtdk.cli.lab.list import list_claims
from sqrtdk.cli.lab.report import report
from sqrtdk.cli.lab.run import run
from sqrtdk.cli.lab.show import show
from sqrtdk.cli.lab.sweep import sweep
from sqrtdk.cli.verbs import group_of, register

lab = group_of("lab", "Claims about sqrt(d_k) as experiments: a control, intervals and a verdict each.")
register(lab, list_claims, "list")
for _verb in (show, run, report, sweep):
    register(lab, _verb)
