"""What benchmarks share.

comparison       variants of the same work in turn, and the ratio of each to its peers
session          one run of a benchmark: its tables and its JSON file
workload         models, configurations, and a strategy built as the engine builds it
methods          named ways to train the same model: torch DDP and its hooks, DiLoCo as a bare loop, ours
world            rank processes that wait for messages, so that variants take turns in them
elastic_run      a server and workers of the elastic plane
mesh_bytes       cases and byte formulas of the mesh plane
peer_programs    hivemind and Ray as programs of their own
pipes            JSON lines between a benchmark and the processes that it starts
processes        commands that are ended with all they have started; bytes between processes
network          hosts from network namespaces, with limited links
slow             processes limited to a quarter of their core
jobs             independent measurements, several at a time
plot             curves as SVG
"""

from benchmarks.harness.comparison import Comparison, Measured, Target, Variant, timed
from benchmarks.harness.session import Session

__all__ = ["Comparison", "Measured", "Session", "Target", "Variant", "timed"]
