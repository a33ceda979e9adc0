"""Turns text and pictures into rows: loading, tokenising, packing, masking."""
