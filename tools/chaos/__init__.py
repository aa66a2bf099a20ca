"""Ten minutes of faults on the elastic plane, and the books afterwards.

    python -m tools.chaos                              each method, four workers, ten minutes of faults
                                                       after as much without: about an hour and a half
    python -m tools.chaos --strategy edp --minutes 2 --seed 7 --faults kill,server
    python -m tools.chaos --replay chaos-allreduce-7.json

Workers and the server are processes on hosts of their own (network namespaces; on loopback, without cut links, where those
cannot be had). Which fault comes when is a function of the seed alone, and is written to a file that --replay reads.

    kill      kill -9 a worker; another is started in its place
    server    kill -9 the server, or coordinator; it is started again
    freeze    SIGSTOP a worker for some seconds
    cut       the link of a worker's host goes down for some seconds; nobody is told
    partial   a worker reaches the server and no other worker, for some seconds
    oneway    what a worker sends to the other workers is dropped, for some seconds; it hears them
    slow      what a worker sends crawls, for some seconds
    join      a worker leaves in good order, and one with its rank joins

What must hold, or the exit status is 1:

    rules     `engine.history.check` has nothing to say: no committed step lost or doubled, no sample lost or counted twice
    hashes    where every worker has the whole model, all end with the same bits
    stalls    from a fault to the next committed step that does not need the victim: at most what ALLOWED says, and a round
              where that has several steps
    goodput   at least 95 % of that of a run without faults (--least-goodput)
    loss      at the end within 0.02 (edp: 0.05) of a run of as many steps without faults, in validation (--loss-margin)

Goodput is the share of the living workers' time that went into gradients that counted:

    committed samples x seconds of computing per sample / seconds that workers were alive

Computing is measured by the workers themselves, in the same run. A worker is alive from the moment it is ready to join until it
is killed, and not while it is frozen or cut off. With kills only, all of that time counts. Other faults are known only after a
silence, in which everybody waits in vain: that time, up to what is allowed, is left out of the goodput that is held against
95 %, and the table shows both.

A step of a worker takes PACE_S, most of which it sleeps: so five machines fit onto one with two cores.
"""
