"""Measurements of what a position encoding does to an image model."""
