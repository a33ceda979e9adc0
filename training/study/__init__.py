"""The study: schemes x tasks x seeds x lengths, run where it is missing, aggregated and reported."""
