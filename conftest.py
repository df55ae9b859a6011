"""Which tests run. Modules without tests that import what may be missing are not asked for examples then."""

from importlib.util import find_spec

from tests.tiers import pytest_addoption as pytest_addoption
from tests.tiers import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.tiers import pytest_configure as pytest_configure

IMPORTS = {
    "triton": ("src/sqrtdk/impl/gpu/*.py",),
    "mdit_py_plugins": ("tests/docs/pages.py",),
    "playwright": ("tests/report/contrast.py", "tests/support/playwright_here.py"),
    "jaxtyping": ("src/sqrtdk/_shapes.py", "tests/shapes/checked.py", "tests/shapes/wrong.py"),
}
collect_ignore_glob = [path for package, paths in IMPORTS.items() if find_spec(package) is None for path in paths]
