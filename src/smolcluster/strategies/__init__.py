"""The algorithms: one file each, in the order of its paper. Steps that several of them share are in base/.

single.py           one process: the reference
allreduce.py        ClassicDP: gradients averaged, bounded staleness
fsdp.py             ZeRO stages 0 and 1; fsdp_sharded.py: stages 2 and 3
pipeline.py         stages of layers
tensor.py           sharded layers
mesh.py             3D
syncps.py           synchronous parameter server; its server: engine/elastic/parameter_server/synchronous.py
edp.py              asynchronous parameter server; its server: asynchronous.py in the same folder
diloco.py           local steps, outer optimizer; diloco_nested.py: between sites of several ranks
base/               the interface, and bases that these share
registry.py         find a strategy by name
"""
