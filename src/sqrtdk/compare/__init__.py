"""Why two implementations of one model differ: calls aligned, compared stage by stage, causes proven."""

from sqrtdk._leads import says_if_called as _says_if_called

_says_if_called(__name__)
