"""Ten minutes of faults on the elastic plane, compared with a run without faults.

    python -m tools.chaos                              each method, four workers, ten minutes of faults
                                                       after as much without: about an hour and a half
    python -m tools.chaos --strategy edp --minutes 2 --seed 7 --faults kill,server
    python -m tools.chaos --replay chaos-allreduce-7.json

Workers and the server are processes on hosts of their own (network namespaces; on loopback, without faults of links, where
these are not available). The schedule of faults is a function of the seed alone, and is written to a file that --replay reads.

    kill      kill -9 a worker; another is started in its place
    server    kill -9 the server, or coordinator; it is restarted
    freeze    SIGSTOP a worker for some seconds
    cut       the link of a worker's host goes down for some seconds; no connection is closed
    partial   a worker reaches the server and no other worker, for some seconds
    oneway    packets from a worker to the other workers are dropped, for some seconds; those to it arrive
    slow      what a worker sends is limited to 1 Mbit/s, for some seconds
    join      a worker leaves, and one with its rank joins

Rules; if one is broken, the exit status is 1:

    rules     `engine.elastic.history.check` finds nothing: no committed step lost or doubled, no sample lost or counted twice
    hashes    where every worker has the whole model, all end with the same bits
    stalls    from a fault to the next committed step that does not need the victim: at most ALLOWED, and a round where that has
              several steps
    goodput   at least 95 % of that of a run without faults (--least-goodput)
    loss      validation loss at the end within 0.02 (edp: 0.05) of a run of as many steps without faults (--loss-margin)

Goodput is the share of the living workers' time that was spent on gradients that counted:

    committed samples x seconds of computing per sample / seconds that workers were alive

Computing is measured by the workers themselves, in the same run. A worker is alive from when it is ready to join until it is
killed, except while it is frozen or cut off. With kills only, all of that time counts. Other faults are detected only by a
silence, in which all workers wait: that time, up to ALLOWED, is excluded from the goodput that is compared with 95 %; the table
shows both.

A step of a worker takes PACE_S, most of which it sleeps: so five machines fit onto one with two cores.
"""
