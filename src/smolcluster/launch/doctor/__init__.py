"""`smolcluster doctor`: find the layer that fails, and its remedy.

    layers.py    all layers with their known problems and remedies, also for the docs' troubleshooting page
    machine.py   checks of this machine
    server.py    checks of a server, by HOST:PORT
    cluster.py   checks of the machines of a cluster file, and of the paths between them

Each check yields findings: good, warning or bad. Nothing is changed anywhere.
"""
