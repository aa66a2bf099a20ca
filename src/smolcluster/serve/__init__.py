"""Inference over several machines: stages hold the layers, a front routes batches through them.

    client ── HTTP ──> front                        tokenizes; knows the stages; schedules sequences
                         │ tokens
                         └──> stage 0 ── activations ──> stage 1 ── activations ──> stage 2 ── one token per sequence

`engine/types.py` has the interface; `in_process.py` is all of it in one process: read it first.

    engine/    models in files: sources.py; one stage: stage_model.py, sampling.py, stage.py; all of them: wire.py, layout.py,
               scheduler.py, front.py
    text/      conversations to tokens and back
    http/      service.py, api.py: the HTTP service
    client/    the terminal
"""
