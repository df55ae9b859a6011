"""Laws: one thing is changed, and what must not move is looked at. docs/en/laws.md describes each.

`ask` asks them of a model, as `sqrtdk check` does; `LAWS` has them all by name.
"""

from sqrtdk.audit.records import LawAnswer as LawAnswer
from sqrtdk.laws.ask import LawReport as LawReport
from sqrtdk.laws.ask import ask as ask
from sqrtdk.laws.table import LAWS as LAWS
