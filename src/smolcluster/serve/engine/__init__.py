"""Layers in stages, and the front that routes batches through them.

types.py          the interface of an engine: requests in, tokens out
front.py          tracks stages and sequences; connected_stage.py: one of them
layout.py         which stage holds which layers (pure)
scheduler.py      sequences in, batches out (pure)
stage.py          a stage process; next_stages.py: its links to the next
stage_model.py    its layers and KV caches; sampling.py: the next token
stage_weights.py  its weights; weight_sender.py: sent by the front
wire.py           messages between front and stages
local.py          stages on this machine
sources.py        find a model: run_source.py, folder_source.py, gguf_source.py, all model_source.py
"""
