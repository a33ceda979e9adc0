"""Initialization of a new scheme's parameters in a pretrained model, fitted to the old scheme."""
