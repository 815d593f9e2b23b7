"""Sphinx configuration of these pages: `make docs`."""

import sys
from pathlib import Path

import canter

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Canter"
author = "The Canter authors"
copyright = "2026, the Canter authors; Apache-2.0"
release = version = canter.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "config_reference"]
exclude_patterns = ["pictures"]

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # as in the source, not `<function ignore at 0x7f...>`
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
default_role = "code"  # docstrings mark names by single backticks, as Markdown does

html_theme = "furo"
html_title = f"Canter {version}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_extra_path = ["llms.txt"]  # its links are to the pages' own Markdown, which Sphinx copies to `_sources`
html_show_sphinx = False
