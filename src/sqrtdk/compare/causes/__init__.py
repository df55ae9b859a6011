"""Causes: one a file, each with `NAME` and `suspect(pair)`, which yields the changes that would explain a difference.

The table is in the order in which they are tried: what comes first in an attention comes first.
"""

from __future__ import annotations
