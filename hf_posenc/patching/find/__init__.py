"""What an architecture has: its stacks and sites, its rotary functions and tables, and what is declared about it."""
