"""The building blocks of fsdp, tensor, pipeline and mesh.

placement.py         the result of `Strategy.plan` of any strategy: seats, costs, refusals
axes.py              numbering of ranks on a mesh
stages.py            a model cut into pipeline stages; split.py: by speed; tracing.py: any model
pipe.py              torch's schedules over these stages; timeline.py: drawn
fsdp2.py             ZeRO stages 2 and 3
owned_buckets.py     ZeRO stage 1 on the mesh plane; owned_sum.py: on the elastic plane
shards.py            the owner of each parameter
zero.py, encoding.py formulas: memory and bytes
tensor_styles.py     tensor parallelism
context.py           context parallelism
exchange.py          gradients between data shards
fragments.py         fragments of a model, for streaming `diloco`
"""
