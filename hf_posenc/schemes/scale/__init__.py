"""Factors of the attention logits that depend on the query's position."""
