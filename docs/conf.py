"""Settings of the documentation site: `python -m sphinx -W docs outputs/site`."""

from hf_posenc.version import __version__

project = "hf_posenc"
author = "The hf_posenc contributors"
copyright = author
release = __version__
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["explorer", "schemes"]
# Docstrings write code between single backticks.
default_role = "code"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Notebooks are committed with their outputs; tests/test_notebooks.py executes them.
nb_execution_mode = "off"

html_theme = "pydata_sphinx_theme"
html_title = "hf_posenc"
