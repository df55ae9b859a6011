"""Engines: where the cells of a sweep, or the checkpoints of a run, are computed. Each gives the same numbers."""

from sqrtdk.engines._engine import Cell as Cell
from sqrtdk.engines._engine import Engine as Engine
from sqrtdk.engines._open import ENGINES as ENGINES
from sqrtdk.engines._open import open_engine as open_engine
