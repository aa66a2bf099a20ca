"""Exchange of tensors between the members of a run.

group.py          the interface of a group of ranks; memory_group.py: one in threads, for tests and for a world of size 1
rounds.py         rounds: contribution, combination (the reduction), commit
buckets.py        gradients in flat buckets, all-reduced during backward
codecs/           gradients as bytes
encoded_sum.py    all-reduce of encoded gradients
gathered_mean.py  mean of encoded contributions, gathered by every member
contributions.py  encoded contributions, sent to the member that sums them
fragmented.py     one fragment of the model in each round
view.py           the members of a round, numbered by epoch
work.py           handles of asynchronous work, traffic counters
mesh/             groups over `torch.distributed`
elastic/          groups over our own transport: transport/, membership/, collectives/
kv_store.py       values that ranks share outside collectives
addresses.py, link_speed.py, sharded.py    helpers
"""
