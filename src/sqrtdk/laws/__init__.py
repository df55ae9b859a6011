"""Laws: change one part of a model's inputs, and check that nothing moves that must not. See docs/en/laws.md.

`ask` asks laws of a model, as `sqrtdk check` does; `LAWS` has a row for each law.
"""

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.audit.records import LawAnswer as LawAnswer
from sqrtdk.laws.ask import LawReport as LawReport
from sqrtdk.laws.ask import ask as ask
from sqrtdk.laws.table import LAWS as LAWS
from sqrtdk.laws.table import LawRow as LawRow

_says_if_called(__name__)
