"""Outside attention: the calls of modules of both sides, where they begin to differ, and what causes it."""
