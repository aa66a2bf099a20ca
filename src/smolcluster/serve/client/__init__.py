"""The terminal client.

terminal.py  `smolcluster chat` and `generate`
http.py      the API's client
"""
