"""The kinds of tokens, each in a file of its own."""

from hf_posenc.patching.anatomy.sites import register_layouts
from hf_posenc.patching.layouts.grid import Grid
from hf_posenc.patching.layouts.layout import Text
from hf_posenc.patching.layouts.series import Series

# What is neither patches nor a series is a text.
register_layouts(Grid, Series, Text)

__all__ = ["Grid", "Series", "Text"]
