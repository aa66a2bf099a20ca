"""What happens in a run (`events`), and who is told: consoles, files and trackers. Nothing here imports torch."""
