"""Maps that change the positions of a scheme: sampled, grouped, split into segments, stretched."""
