"""The events of a run (`events`) and the sinks that receive them: consoles, files, trackers. Nothing here imports torch."""
