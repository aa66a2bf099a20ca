"""Inference over several machines: the layers of a model in stages, one front before them.

    a user ── HTTP ──> front                        tokens in, tokens out; who holds which layers; who waits
                         │ tokens                          ┌────────────────────────────────────────┐
                         └──> stage 0 ── activations ──> stage 1 ── activations ──> stage 2 ── a token of each sequence

`engine/types.py` has the types that all of it is written in; `alone.py` is all of it in one process: read it first.

    engine/    what is served: sources.py; one machine's share of the work: part.py, sampling.py; the machines together:
               wire.py, stage.py, layout.py, scheduler.py, front.py
    text/      conversations to tokens and back
    http/      service.py, api.py: the service on a port
    client/    the terminal
"""
