"""The site: `make docs` builds it from these pages, with warnings as errors and without a network."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Keel"
author = "The Keel developers"
copyright = "The Keel developers"
version = release = version_of("keel-fl")
html_title = "Keel"

extensions = ["myst_parser", "_extension"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_extension"]
language = "en"

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "attrs_block"]
nitpicky = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["keel.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00558c", "color-brand-content": "#00558c"},
    "dark_css_variables": {"color-brand-primary": "#5cb3ea", "color-brand-content": "#5cb3ea"},
}
