"""What a study leaves for readers, from its `results.json`: tables, sentences, figures, a page and model cards."""
