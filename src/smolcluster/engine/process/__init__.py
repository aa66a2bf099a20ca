"""The process around a worker or server: how it starts, its channel to the launcher, its identity."""
