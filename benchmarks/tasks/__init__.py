"""Tasks that benchmarks train."""
