"""Everything a stranger can throw at the listening sockets of a run that trains, and of a model that is served.

    python -m tools.abuse                                  10^6 damaged frames at each subject and all the rest
    python -m tools.abuse --only serving                   one of the subjects: training, serving
    python -m tools.abuse --frames 20000 --run syncps      fewer, at one of the runs
    python -m tools.abuse --attack idle loris              some of the attacks
    python -m tools.abuse --run serve --door front         one of the sockets of a model that is served

    subject     runs                                                       its file
    training    syncps, allreduce; syncps-token, allreduce-token: by TLS   training.py
    serving     serve; serve-token: by TLS, and a key for HTTP             serving.py

    attack, on the elastic plane (elastic.py)
    flood       damaged frames, one a connection: bits flipped, fields and lengths changed with checksums that fit, noise;
                from strangers, and from processes that went through the handshake but are no members
    monsters    headers that announce up to 2^64 - 1 bytes
    json        meta that is deep, huge, or full of huge numbers
    bombs       payloads that would be large if anybody unpacked them, and objects that would run if anybody unpickled them
    idle        a thousand connections that say nothing
    loris       a hundred that say a byte now and then
    impostors   no token, a wrong one, another cluster's id, TLS 1.2, a recorded handshake
    hoard       a process that is no member sends what is in order and leaves it to the other side to keep it, or asks and
                never reads the answers
    forge       (serving) messages in order with the numbers of batches and sequences that are under way

    attack, on an HTTP port (web.py); bombs, idle, loris and impostors (no key, a wrong one) are tried there, too
    requests    damaged requests, one a connection
    bodies      bodies that are announced to be huge, and some without an end
    origins     every verb on every path, from pages of other sites and under other names (DNS rebinding)

What must hold, or the exit status is 1:

    every connection is ended by the other side; nobody dies; nothing is executed
    a process grows by at most 16 MB                                                     (all attacks together)
    an announcement that is too large is refused within 10 ms, and costs less than 1 MB  (median; monsters, bodies)
    who does not prove itself is gone after 5 s; who does not ask an HTTP port, after 10 (idle, loris)
    no impostor and no page of another site hears anything but a refusal
    the work slows by at most 2 % under idle, loris and monsters, if it can be told from the noise between quiet spells

    training: nobody joins, nobody is lost, no gradient is refused, and the history keeps its rules; the weights at the end are
              those of a run that nobody disturbed, to the last bit
    serving:  every question is answered, before, during and after, with the text that one process gives that has all the
              weights; log probabilities stay the same to 0.001. No server says 500, no log has a traceback

Only Linux tells so much about other processes. Attackers share the machine with the run, so a flood slows it for want of
processors: that is shown, and held against nothing.
"""
