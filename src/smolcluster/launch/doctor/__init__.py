"""`smolcluster doctor`: which layer fails, and what to do about it.

    layers.py    every layer, what may be wrong with it and the remedy: the table behind the docs' troubleshooting page
    here.py      this machine
    there.py     a server somewhere, by HOST:PORT
    cluster.py   the machines of a cluster file, and the paths between them

A finding is good, a warning or bad. Nothing is changed anywhere.
"""
