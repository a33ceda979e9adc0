"""The study: schemes x tasks x seeds x lengths. It runs missing trainings, aggregates results and reports them."""
