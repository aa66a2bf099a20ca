"""What happens in a run (`events`), and the sinks that receive it: consoles, files and trackers. Nothing here imports torch."""
