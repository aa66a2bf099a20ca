"""The peer runtime of the elastic plane, for machines that come and go. Serving and launchers use its transport too.

transport/    typed frames over TCP and TLS
membership/   the members of a run, as the server and as a worker know them
collectives/  sums and copies between the members of a view
"""
