"""The grid of patches in the calls of a stack whose input is pixels."""
