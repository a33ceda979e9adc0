"""Text to rows: loading, tokenising, packing, masking."""
