"""The explorer: a page on this machine alone, `sqrtdk app`, that shows what a scale does to an attention.

It calls the library and has no mathematics of its own. Nothing of it is imported before it runs.
"""
