"""Entry points of worker and server processes, warm starts and standby processes."""
