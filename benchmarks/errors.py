"""The error of the benchmarks. Its message says what was found, why it cannot work, and what to do instead."""


class BenchmarkError(Exception):
    """A benchmark cannot run with the given options."""
