"""Sphinx settings of the site; `.venv/bin/python -m website` builds it."""

project = "Tandem"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
html_theme = "furo"
html_title = "Tandem"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
myst_heading_anchors = 4
suppress_warnings = ["toc.not_included"]  # pages that other pages lead to, and no table of contents
