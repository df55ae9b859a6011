"""Modules that hold no tests and import what may be missing are not asked for docstrings' examples then."""

from importlib.util import find_spec

IMPORTS = {
    "triton": ("src/sqrtdk/impl/gpu/*.py",),
    "mdit_py_plugins": ("tests/docs/pages.py",),
    "playwright": ("tests/report/contrast.py", "tests/support/playwright_here.py"),
    "jaxtyping": ("src/sqrtdk/_shapes.py", "tests/shapes/checked.py", "tests/shapes/wrong.py"),
}
collect_ignore_glob = [path for package, paths in IMPORTS.items() if find_spec(package) is None for path in paths]
