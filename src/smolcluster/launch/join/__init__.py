"""Discover a machine on the network, pair with it, and let it join a run."""
