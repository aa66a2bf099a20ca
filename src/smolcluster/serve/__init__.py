"""Inference over several machines: the layers of a model in stages, one front before them.

    a user ── HTTP ──> front                        tokens in, tokens out; who holds which layers; who waits
                         │ tokens                          ┌────────────────────────────────────────┐
                         └──> stage 0 ── activations ──> stage 1 ── activations ──> stage 2 ── a token of each sequence

`ask.py` has the words that all of it is written in; `alone.py` is all of it in one process, for a start. What is served:
`sources.py`. One machine's share of the work: `part.py`, `sampling.py`. The machines together: `wire.py`, `stage.py`,
`layout.py`, `scheduler.py`, `front.py`. Text and the world: `text.py`, `service.py`, `api.py`.
"""
