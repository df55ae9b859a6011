"""Settings of both trees of the documentation, docs/en and docs/zh; build.py builds them."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "sqrtdk"
copyright = "the authors of sqrtdk, Apache-2.0"
release = metadata.version("sqrtdk")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "blocks",
    "chinese",
    "languages",
    "linebreaks",
    "mathml",
    "public",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["figures"]
# "linkify" is left out: a file's name that ends like a domain would become a link
myst_enable_extensions = ["dollarmath", "deflist", "attrs_inline"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
html_math_renderer = "mathml"
default_role = "code"  # docstrings write code between single backticks

napoleon_numpy_docstring = False
napoleon_custom_sections = [("Differs from", "notes_style"), ("Differs from torch", "notes_style"), "Reference"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
templates_path = ["templates"]
html_copy_source = False
html_show_sphinx = False
html_use_index = False
html_theme_options = {"top_of_page_buttons": []}
