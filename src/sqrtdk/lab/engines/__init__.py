"""Engines: where the cells of a sweep or of a training claim are computed. Each gives the same numbers."""

from sqrtdk.lab.engines._engine import Engine as Engine
from sqrtdk.lab.engines._open import ENGINES as ENGINES
from sqrtdk.lab.engines._open import open_engine as open_engine
