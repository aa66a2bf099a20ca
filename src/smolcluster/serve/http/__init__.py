"""The service on a port: OpenAI's interface, a simple one, and metrics."""
