"""Sweeps: the effect of a scale on logits and weights over a grid of sizes, rules and distributions, against theory."""

from sqrtdk_lab.sweep._cell import SWEEP_FIGURES as SWEEP_FIGURES
from sqrtdk_lab.sweep._cell import measure as measure
from sqrtdk_lab.sweep._grid import DISTRIBUTIONS as DISTRIBUTIONS
from sqrtdk_lab.sweep._grid import Grid as Grid
from sqrtdk_lab.sweep._grid import whole_numbers as whole_numbers
from sqrtdk_lab.sweep._grid import words as words
from sqrtdk_lab.sweep._sweep import Swept as Swept
from sqrtdk_lab.sweep._sweep import summary as summary
from sqrtdk_lab.sweep._sweep import sweep as sweep
