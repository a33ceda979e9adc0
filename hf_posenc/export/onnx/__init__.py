"""ONNX: one graph for prefill and decoding, or one for an encoder, with every length left open."""
