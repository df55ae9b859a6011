"""A copy of the package with an error in it, for another process."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import sqrtdk
from tests.planting.changes import Planted
from tests.planting.tokens import changed_text
from tests.planting.trees import changed_tree

HOME = Path(sqrtdk.__file__).parent


def changed_code(text: str, planted: Planted) -> str:
    """The file's text with the error in it; of Python, without its comments."""
    return ast.unparse(changed_tree(text, planted)) if planted.file.endswith(".py") else changed_text(text, planted)


def planted_copy(planted: Planted, folder: Path) -> None:
    """Copy the package into the folder, the error in it; what Python compiled of the other files still fits."""
    shutil.copytree(HOME, folder / "sqrtdk", ignore=shutil.ignore_patterns("*.pyc.*"))  # those are being written
    file = folder / "sqrtdk" / planted.file
    file.write_text(changed_code(file.read_text(), planted))
