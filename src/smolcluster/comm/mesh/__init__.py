"""Groups of a fixed world, over `torch.distributed`.

rendezvous.py     how the ranks connect to each other
backends.py       gloo, nccl or mpi
torch_group.py    the group; reduce_scatter.py: reduce_scatter over gloo with half the bytes
liveness.py       detects lost ranks where no launcher does; heartbeats.py: what ranks, or launchers, report to each other
torch_traffic.py  bytes that torch's own collectives move; volume.py: formulas for the bytes of collectives
"""
