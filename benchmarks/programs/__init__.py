"""Programs that a benchmark starts as processes: ranks of a world, a front of a serving cluster, one run of P14."""
