"""What happens in a forward pass of a patched model."""
