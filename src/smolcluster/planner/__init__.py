"""Forecasts for a set of machines: memory and bytes of a step, and which strategies fit. Nothing is trained."""
