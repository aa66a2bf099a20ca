"""The live page of a run and its terminal view, made from the files of the run directory and readings of this machine.

run_reader.py       reads metrics.jsonl, history and logs as they grow (follow.py, run_files.py, logs.py)
ranks.py            one rank: its latest row and its state
run_curve.py        curves over the run; downsample.py, step_times.py: their points and times
links.py            traffic of each link
snapshot_stream.py  all of this as JSON: a snapshot, then changes
hub.py              one reader per run, shared by all viewers
app.py, server.py   the ASGI application and its port
runs.py             the list of runs
static/             the page: app.js, panels in overview.js, charts in chart.js
terminal.py         `smolcluster top`
__main__.py         the dashboard in a separate process
"""
