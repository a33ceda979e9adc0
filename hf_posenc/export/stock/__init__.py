"""Plain transformers checkpoints: the carriers of a scheme, and the comparison that verifies one."""
