"""Training image classifiers: options, pictures as rows, and one run."""
