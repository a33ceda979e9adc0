"""Calls of stacks whose input is a series of features."""
