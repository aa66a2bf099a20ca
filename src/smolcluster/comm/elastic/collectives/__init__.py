"""Sums and copies between the members of a view, over the elastic transport."""
