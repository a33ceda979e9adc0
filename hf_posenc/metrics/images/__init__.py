"""What a position encoding does to a model of images, measured."""
