"""The explorer (`sqrtdk app`): a page, served on this machine only, that shows what a scale does to attention.

It calls the library and contains no mathematics of its own. It is imported only when it runs.
"""
