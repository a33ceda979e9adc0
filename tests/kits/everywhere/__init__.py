"""Patched models in programs that do not know this package, compared with transformers on real text.

`python -m tests.kits.everywhere` makes the models, exports them, runs them in plain transformers, llama.cpp and
onnxruntime, and writes the numbers and a page.
"""
