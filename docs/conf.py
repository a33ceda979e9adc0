"""Settings of the documentation site: `python -m sphinx -W docs outputs/site`."""

import sys
from pathlib import Path

from hf_posenc.version import __version__

HERE = Path(__file__).resolve().parent
# The extensions, and training/, whose settings the reference lists.
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

project = "hf_posenc"
author = "The hf_posenc contributors"
copyright = author
release = __version__
language = "en"
# Pages show options of commands, whose two hyphens would become a dash.
smartquotes = False
# Code without a language is a formula, an output or a list of files.
highlight_language = "none"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "dark_images",
    "docstrings",
    "generated_reference",
    "repository_files",
    "scheme_pages",
]
exclude_patterns = ["explorer"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
# Docstrings write code between single backticks.
default_role = "code"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Notebooks are committed with their outputs; tests/test_notebooks.py executes them.
nb_execution_mode = "off"

#: Markdown files outside docs/ that are pages of the site too.
repository_pages = ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md",
                    "model_cards/README.md", "model_cards/findings-*.md", "tests/kits/README.md"]  # fmt: skip
#: Where links to other files of the repository lead, such as "https://github.com/OWNER/hf_posenc". If it is empty, the
#: site shows these files itself.
repository_url = ""

toc_object_entries_show_parents = "hide"

#: Pages of wide tables.
WIDE_PAGES = (
    "reference/architectures",
    "reference/runtimes",
    "reference/tools",
    "results/properties",
    "study/leaderboard",
)
html_theme = "pydata_sphinx_theme"
html_title = "hf_posenc"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("tables.js", {"defer": "defer"})]
html_copy_source = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": f"hf_posenc {release}"},
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    # A page without it has more room.
    "secondary_sidebar_items": {"**": ["page-toc"]} | {page: [] for page in WIDE_PAGES},
    "article_footer_items": [],
    "footer_start": ["copyright"],
    "footer_end": [],
}
