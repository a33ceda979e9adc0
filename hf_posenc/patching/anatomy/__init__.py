"""Discovery: the stacks, attention layers, rotary functions and position tables of a model, and declarations."""
