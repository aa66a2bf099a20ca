"""The events of a run and the sinks that receive them. Only TensorBoard's sink imports torch.

events.py       typed events
observer.py     delivers them to sinks; pipe.py: from a worker process to its launcher
console.py      the terminal; live.py: in place; run_state.py: the state that it shows; plot.py, text.py: its parts
summary.py      what a run prints at its end
jsonl.py        metrics.jsonl
tracking.py     TensorBoard, Weights & Biases
prometheus.py   metrics for Prometheus
logs.py         logging to files; tracebacks.py: without frames of libraries
loki.py         pushes these files to Loki; log_queue.py: a file as a queue
machine.py      temperature, load and memory of this machine
"""
