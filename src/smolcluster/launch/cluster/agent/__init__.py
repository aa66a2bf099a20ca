"""What a machine of a cluster does for us while we are connected: sent over ssh as text, run by whatever Python is there.

    stdin    one request a line, as JSON: {"op": "start", ...}; "bytes": N means that N raw bytes follow
    stdout   {"say": ...} while it works, then {"result": ...} or {"error": what is wrong, "remedy": what to do}

It needs the standard library and keeper.py, which is sent along; `host.py` names what is sent. It changes nothing outside
`folder`, and what it starts does not need it any more. In `folder`:

    code/HASH/                the package, the same for all clusters
    env/HASH/                 an environment with what the package needs, made with one Python
    clusters/NAME/            where processes run: the user's files, config.yaml, token, runs/, logs/
    clusters/NAME/processes/  a folder for each process
    clusters/NAME/ups/        a mark for each time that it was brought up since it was taken down
"""
