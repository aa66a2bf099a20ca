"""Layers in stages, and the front that routes batches through them.

types.py          the interface of an engine: requests in, tokens out
front.py          tracks stages and sequences; connected_stage.py: one connected stage
layout.py         which stage holds which layers (pure)
scheduler.py      sequences in, batches out (pure)
stage.py          a stage process; next_stages.py: its links to the stages after it
stage_model.py    its layers and their KV caches; sampling.py: the next token
stage_weights.py  its weights; weight_sender.py: sends them from the front
wire.py           messages between front and stages
local.py          stage processes on this machine
sources.py        find a model: run_source.py, folder_source.py, gguf_source.py; model_source.py: their base class
"""
