"""`train --elastic MIN:MAX`: restart the mesh plane's workers when one dies or a machine joins.

launcher.py    the launcher of one machine
rendezvous.py  launchers agree on a round: which machines run which ranks
endpoint.py    their connection
plan.py        the world sizes that the range allows
"""
