"""A parameter server, synchronous or asynchronous, and the rounds of its workers."""
