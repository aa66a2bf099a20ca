"""Measure against peers: the same work, interleaved, as a ratio. `python -m benchmarks` lists all benchmarks.

    NAME.py      a benchmark, run by `python -m benchmarks NAME`
    harness/     what they share: comparison, worlds of ranks, limited links, slow machines
    peers/       what ours is compared with
    programs/    other programs that a benchmark starts as processes
    tasks/       tasks that are trained only here
    results/     raw samples of the last measurement

A new benchmark is a module with a docstring (what is compared, and how), `EXAMPLE`, `add_arguments(parser)` and
`run(session, arguments)`, and a line below.
"""

# The module of this name, and one line about it. Nothing is imported to show the list.
BENCHMARKS = {
    "p1": "sum of 1-40 MB over limited links against gloo all_reduce",
    "p2": "time to a loss between hosts at 1, 10 and 100 Mbit/s, against torch DDP, and a picture of it",
    "p3": "bytes on the wire at the loss of torch DDP: parameter servers with every codec, and diloco",
    "p4": "time to a loss with one of two workers at a quarter of the speed, against torch DDP",
    "p5": "idle time of each pipeline schedule against its formula",
    "p6": "memory of a rank, ZeRO stages 0 to 3, against the formula, FSDP2 alone and the forecast",
    "p7": "one worker through the loop and a strategy against the bare PyTorch loop",
    "p8": "inference over 1, 2 and 4 stages, 1 and 8 streams, against the same weights in one process",
    "p9": "kill -9 one of 4 workers: time to the next step, against elastic torchrun",
    "p10": "how long a checkpoint stops training, against torch.save and DCP",
    "p12": "bytes that each strategy moves in a step, against its formula",
    "p13": "start-up: `smolcluster --help`, and `train` to the first step on 2 workers",
    "p14": "loss after equal samples: edp and diloco on 2, 4 and 8 workers, one slow, against single",
    "ddp": "step time of allreduce against torch DDP, on loopback or a limited link",
    "trends": "loss of diloco at equal tokens over H, workers, lost contributions, bits and k, beside the papers' figures",
    "exchange": "what the exchange of a round of diloco costs on a GPU, beside the local steps of the round",
    "watched": "what the dashboard with 50 viewers, and logs pushed to Loki, cost training",
    "codecs": "time to encode and to decode a gradient with every codec, beside a copy of it",
}
