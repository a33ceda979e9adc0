"""Where a stack whose input is pixels gets the grid of its patches, and its tables over that grid."""
