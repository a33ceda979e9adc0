"""The target "gguf": a file for llama.cpp, checked in llama.cpp."""
