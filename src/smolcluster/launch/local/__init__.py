"""The processes of a run on this machine.

supervisor.py  when to restart a process, and when to end the run: the table in its docstring
mesh.py        workers of the mesh plane
elastic.py     a server and workers of the elastic plane
processes.py   start one, talk to it, end it
outcome.py     the outcome of the run
"""
