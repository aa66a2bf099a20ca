"""A machine joins a run.

discovery.py  find machines on the network, by multicast DNS
pairing.py    accept one by the code on its screen
worker.py     run its worker
"""
