"""Recovering a pretrained model whose position encoding was swapped."""
