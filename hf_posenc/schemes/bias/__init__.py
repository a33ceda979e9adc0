"""Numbers added to the attention logits."""
