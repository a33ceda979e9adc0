"""Patched models in programs that do not know this package, compared with transformers on real text.

`python -m tests.kits.everywhere` makes the models, exports them, runs them in plain transformers, llama.cpp and
onnxruntime, chats with them over HTTP, and writes the numbers and a page.
"""
