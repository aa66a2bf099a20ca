"""The elastic plane: a server process, and workers that may join and leave at any time.

server.py            the server process: admits workers, writes the record of the run
server_side.py       base of all servers: waits for members, grants leases, refuses gradients
parameter_server/    servers that hold the weights: `syncps`, `edp`
coordination/        the coordinator, where workers hold the weights: `allreduce`, `fsdp`, `diloco`
worker.py            the worker process: joins, trains, rejoins
member/              the worker's side of membership and rounds, and its local state
wal/                 the server's write-ahead log; history.py: the readable log of commits and membership
admission.py         which workers may join; adopted_config.py: what they adopt from the server's configuration
gradient_gate.py     refuses gradients that are not finite or far too large; weight_claims.py: false weights
deadline.py          the compute deadline of members; balance.py: equal time on machines of different speed
evaluator.py         evaluation during training; step_outputs.py: when to log, evaluate and save
server_start.py, server_state.py, server_summary.py    parts of server.py
"""
