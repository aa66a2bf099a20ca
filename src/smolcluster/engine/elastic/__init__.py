"""The elastic plane: a server process and workers that come and go.

server.py            the server process: admits workers, keeps the run's record
server_side.py       what every kind of server does for its members: leases, waiting, refusals
parameter_server/    servers that hold the weights: `syncps`, `edp`
coordination/        the coordinator, which holds none: `allreduce`, `fsdp`, `diloco`
worker.py            the worker process: joins, trains, rejoins; member_side.py: its membership
rounds.py            the rounds of a worker: views, leases, agreement
wal/                 the server's write-ahead log; history.py: the readable log of committed steps
admission.py         which workers may join; adopted_config.py: what they adopt from the server's configuration
gradient_gate.py     refuses gradients that are not finite, or far too large; weight_claims.py: their weights
deadline.py          how long a member may compute; balance.py: equal time on unlike machines
evaluator.py         evaluation beside training; step_outputs.py: when to log, evaluate and save
own_state.py         state of one worker on its own disk
server_start.py, server_state.py, server_summary.py    parts of server.py
"""
