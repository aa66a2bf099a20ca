"""The HTTP service: OpenAI's API, a simpler one, the chat page and metrics.

service.py          tokenizes requests, streams tokens from the engine
api.py              routes
request_parsing.py  JSON to requests; response_bodies.py: results to JSON
metrics.py          for Prometheus
server.py           the port and its key
"""
