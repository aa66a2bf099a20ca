"""The write-ahead log of a server.

journal.py    appends committed steps: they survive the server's death
log_files.py  the format of its files
recovery.py   reads it when a server starts
"""
