"""What a person typed that cannot be done."""


class UsageError(Exception):
    """A request of the command line that cannot be carried out; the message says why and what to do."""
