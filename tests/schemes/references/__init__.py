"""Every scheme once more: slow, plain Python written from the papers, one number at a time in double precision."""
