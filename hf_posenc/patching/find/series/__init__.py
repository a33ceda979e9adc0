"""Stacks whose input is a series of features, such as sound, and their position mechanisms."""
