"""Reports of a study from its `results.json`: tables, sentences, figures, a page and model cards."""
