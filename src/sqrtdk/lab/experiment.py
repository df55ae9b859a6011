"""One claim, run: the experiment, its control, the verdicts and the record."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime

import torch

from sqrtdk._environment import cpu_name, numbers_from
from sqrtdk.lab._run import Map, Run, here
from sqrtdk.lab.claim import Claim
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.judge import judge
from sqrtdk.lab.plots import Plot
from sqrtdk.lab.record import Outcome, Record


def run_claim(claim: Claim, *, quick: bool = False, seed: int = 0, compute: Map = here, command: str = "") -> Record:
    """Measure a claim and its control, and judge both.

    Args:
        claim: from `sqrtdk.lab.register.CLAIMS`.
        quick: with the parameters of the quick run.
        seed: of everything random.
        compute: how cells are computed; see `Run.map`.
        command: to be kept in the record.

    Returns:
        The record.
    """
    started, begin = datetime.now(UTC), time.monotonic()
    outcome, plots = _outcome(claim, quick, False, seed, compute)
    control, _ = _outcome(claim, quick, True, seed, compute)
    return Record(
        id=claim.id,
        group=claim.group,
        sources=claim.sources,
        statement=claim.statement,
        formula=claim.formula,
        method=claim.method,
        control_method=claim.control,
        why=claim.why(Figures(list(outcome.figures))),
        quick=quick,
        seed=seed,
        outcome=outcome,
        control=control,
        condition=claim.condition if outcome.verdict.answer == "depends" else None,
        plots=plots,
        environment=environment(),
        command=command,
        started=started.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - begin, 3),
    )


def _outcome(claim: Claim, quick: bool, flipped: bool, seed: int, compute: Map) -> tuple[Outcome, tuple[Plot, ...]]:
    parameters = claim.settings(quick=quick, flipped=flipped)
    measured = claim.measure(Run(parameters, seed, compute))
    verdict = judge(Figures(measured.figures), claim.parts)
    return Outcome(parameters, tuple(measured.figures), verdict), measured.plots


def environment() -> dict[str, str]:
    """Code, versions and machine, as text."""
    return {
        **numbers_from(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }
