"""A kit for a machine with a GPU: is the library right there, what does it launch, what does position cost,
and a small study.

    python -m tests.kits.gpu --output_dir docs/results/gpu
    python -m tests.kits.gpu --smoke

`__main__` starts a worker process for each part and needs nothing but the standard library. The worker runs the cells
of its part one after the other and writes a line for each, so that neither an exception nor a crashed process nor a
hanging compiler ends a run. Where a worker ends within a cell, another one goes on with the next.
"""
