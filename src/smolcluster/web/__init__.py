"""What the HTTP servers of the dashboard (`dashboard/`) and of inference (`serve/`) share.

guard.py          access: Host, method, Origin, token; the security headers of every response
bodies.py         JSON bodies of bounded size, depth and time
pages.py          static files with ETags; static/ has those that all pages share
streams.py        responses that end when the client disconnects
connections.py    timeouts, and a limit of connections
server.py         one port, served by uvicorn
"""
