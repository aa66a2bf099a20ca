"""The processes of a run on this machine, and their supervisor."""
