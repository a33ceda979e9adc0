"""Patched models on disk: loading them back through transformers' own functions, and exporting stock checkpoints."""
