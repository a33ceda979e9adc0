"""ExecuTorch: a program for one sequence at a time, without a cache."""
