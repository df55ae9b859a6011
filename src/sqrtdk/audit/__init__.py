"""The audit: what ran is held against what was declared, rule by rule; `sqrtdk.check` is its entry point."""

from sqrtdk._leads import says_if_called as _says_if_called

_says_if_called(__name__)
