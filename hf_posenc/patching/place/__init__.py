"""Putting a scheme into a model, writing down every change, and taking all of them back."""
