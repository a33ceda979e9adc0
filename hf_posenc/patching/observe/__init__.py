"""What a model shows when it is run: its own scheme, and whether discovery has read it correctly."""
