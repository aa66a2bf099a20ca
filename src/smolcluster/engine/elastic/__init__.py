"""The elastic plane: a server process, and workers that may join and leave at any time.

server.py            the server process: admits workers, writes the record of the run
server_side.py       base of all servers: waits for members, grants leases, refuses gradients
parameter_server/    servers that hold the weights: `syncps`, `edp`
coordination/        the coordinator, where workers hold the weights: `allreduce`, `fsdp`, `diloco`
worker.py            the worker process: joins, trains, rejoins; member_side.py: its membership;
                     alone.py: its training without a link
rounds.py            the rounds of a worker: views, leases, agreement
wal/                 the server's write-ahead log; history.py: the readable log of commits and membership
admission.py         which workers may join; adopted_config.py: what they adopt from the server's configuration
gradient_gate.py     refuses gradients that are not finite or far too large; weight_claims.py: false weights
deadline.py          the compute deadline of members; balance.py: equal time on machines of different speed;
                     busy_time.py: what a step costs a machine besides computing
evaluator.py         evaluation during training; step_outputs.py: when to log, evaluate and save
own_state.py         local state of a worker, on its disk
server_start.py, server_state.py, server_summary.py    parts of server.py
"""
