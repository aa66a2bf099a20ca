"""The terminal client of a service."""
