"""The elastic plane's own peer runtime: typed frames over TCP and TLS between machines that come and go."""
