"""Plug-ins that run checkpoints of patched models in inference engines: vLLM and SGLang.

Both engines have a backend that runs transformers models, with their own linear layers and attention kernels.
`engine_schemes` says which schemes such a backend can compute and keeps them in place, and the modules of the engines
contain only what differs between them.
"""
