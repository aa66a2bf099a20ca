"""A run on many machines, from one file: `smolcluster up`, `status`, `logs`, `down`.

    request.py    parse the arguments of `up`
    layout.py     place processes on machines (pure)
    links.py      find the address by which one machine reaches another (pure)
    archive.py    pack what is sent to a machine: this package, the user's files, the configuration
    host.py       connect to a machine, over ssh or locally, and call its agent
    agent/        on the machine during a connection: inspect, unpack, start, stop
    keeper.py     on the machine, one for each process: its output, state and restarts
    control.py    `up`, `status`, `logs` and `down` on all machines at once
    mirror.py     copy a running run here, for `dashboard` and `top`
    inventory.py  find machines for `cluster init`
    record.py     remember which clusters this machine has started

Nothing here imports torch; agent and keeper need the standard library alone.
"""
