"""Other positions for a scheme: sampled, grouped, split into segments, stretched."""
