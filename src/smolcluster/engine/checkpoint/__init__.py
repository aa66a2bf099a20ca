"""Checkpoints: what is in one, how it becomes durable, how others read it."""
