"""The terminal client.

terminal.py  `smolcluster chat` and `generate`
http.py      client of the HTTP API
"""
