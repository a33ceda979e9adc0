"""The study: schemes x tasks x seeds x lengths. It starts missing training runs, and reports their results."""
