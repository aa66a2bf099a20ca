"""The live page of a run, and the terminal view of the same: made from a run directory alone."""
