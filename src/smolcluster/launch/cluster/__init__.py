"""A run on many machines, from one file: `smolcluster up`, `status`, `logs`, `down`.

    layout.py     from the file to who runs what where: pure
    links.py      which address leads from one machine to another: pure
    parcel.py     what is sent to a machine: this package, the user's files, the configuration
    host.py       a machine: connected over ssh, or this one; its agent is asked, and answers
    agent/        runs on the machine as long as we are connected: looks, unpacks, starts, stops
    keeper.py     runs there beside each process, also when we are gone: its output, its state, its restarts
    control.py    what `up`, `status`, `logs` and `down` do, on all machines at once
    record.py     which clusters this machine has started

Nothing here imports torch; agent and keeper need the standard library alone.
"""
