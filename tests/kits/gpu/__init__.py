"""A kit for a machine with a GPU: is the library right there, and what does it launch.

    python -m tests.kits.gpu --output_dir docs/results/gpu
    python -m tests.kits.gpu --smoke

Each part has cells, which run in separate processes and get a row each in the file of the part. Neither an
exception nor a crashed process nor a hanging compiler ends a run.
"""
