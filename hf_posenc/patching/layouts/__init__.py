"""The kinds of tokens, each in its own file."""

from hf_posenc.patching.anatomy.anatomy import register_layouts
from hf_posenc.patching.layouts.grid import Grid
from hf_posenc.patching.layouts.layout import Text
from hf_posenc.patching.layouts.series import Series

# Tokens that are neither patches nor a series are text.
register_layouts(Grid, Series, Text)

__all__ = ["Grid", "Series", "Text"]
