"""The error of the benchmarks: what was found, why it cannot work, and what to do instead."""


class BenchmarkError(Exception):
    """A benchmark that cannot be run as it was asked for."""
