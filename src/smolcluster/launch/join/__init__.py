"""One more machine for a run: found, paired, joined."""
