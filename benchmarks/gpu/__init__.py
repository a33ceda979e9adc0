"""A kit for a machine with a GPU: is the library right there, what does position cost, and a small study.

    python -m benchmarks.gpu --output_dir docs/results/gpu
    python -m benchmarks.gpu --smoke

`__main__` supervises one worker process and needs nothing but the standard library. The worker runs the parts cell by
cell and tells each result at once, so that neither an exception nor a crashed process nor a hanging compiler ends a
run.
"""
