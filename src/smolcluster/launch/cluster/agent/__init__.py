"""The agent on a machine of a cluster: sent over ssh as source text, run by any Python there, for one connection.

    stdin    one JSON request a line: {"op": "start", ...}; "bytes": N means that N raw bytes follow
    stdout   {"say": ...} for progress, then {"result": ...} or {"error": ..., "remedy": ...}

It needs only the standard library and keeper.py, which is sent along (`host.py` lists the modules). It changes nothing outside
`folder`, and the processes it starts outlive it. In `folder`:

    code/HASH/                the package, shared by all clusters
    env/HASH/                 a virtual environment with the package's requirements
    clusters/NAME/            working directory of processes: the user's files, config.yaml, token, runs/, logs/
    clusters/NAME/processes/  a folder for each process
    clusters/NAME/ups/        a mark for each `up` since the last `down`

Its code: main.py (requests and responses), machine.py (facts), environment.py (a Python), files.py (unpack and read),
processes.py (start, list, stop), following.py (stream output), base.py (shared).
"""
