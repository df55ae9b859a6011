"""The explorer (`sqrtdk app`): a page, served on this machine only, that shows what a scale does to attention.

It calls the library and contains no mathematics of its own; the explorer without a server (`static`) does, in
JavaScript. It is imported only when it runs.
"""
