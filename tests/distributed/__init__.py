"""Two processes on one machine: equal to one process, or refused on both."""
