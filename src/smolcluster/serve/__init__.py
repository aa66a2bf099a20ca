"""Inference over several machines: stages hold the layers, a front routes batches through them.

The front is the process of `smolcluster serve`: router, scheduler and HTTP server. A stage is a process that holds consecutive
layers. A spare is a stage process without layers, on standby until another one is lost.

    client ── HTTP ──> front                        tokenizes; knows the stages; schedules sequences
                         │ token ids
                         └──> stage 0 ── activations ──> stage 1 ── activations ──> stage 2 ── one token per sequence

`engine/types.py` has the interface; `in_process.py` implements it in one process: read it first.

    engine/    models in files: sources.py; one stage: stage_model.py, sampling.py, stage.py; all of them: wire.py, layout.py,
               scheduler.py, front.py
    text/      conversations to tokens and back
    http/      service.py, api.py: the HTTP service
    client/    the client in a terminal
    main.py    `smolcluster serve`
"""
