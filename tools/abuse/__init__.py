"""Attacks on every listening socket of a run that trains, and of a model that is served.

    python -m tools.abuse                                  10^6 damaged frames at each subject, and all other attacks
    python -m tools.abuse --only serving                   one of the subjects: training, serving
    python -m tools.abuse --frames 20000 --run syncps      fewer, at one of the runs
    python -m tools.abuse --attack idle loris              some of the attacks
    python -m tools.abuse --run serve --door front         one of the sockets of a model that is served

    subject     runs                                                       its file
    training    syncps, allreduce; syncps-token, allreduce-token: by TLS   training.py
    serving     serve; serve-token: by TLS, and a key for HTTP             serving.py

    attack, on the elastic plane (elastic.py)
    flood       damaged frames, one a connection: bits flipped, fields and lengths changed with valid checksums, noise; from
                unauthenticated clients, and from clients that passed the handshake and are not members
    monsters    headers that announce up to 2^64 - 1 bytes
    json        meta that is deep, huge, or full of huge numbers
    bombs       payloads that would be large if they were decompressed, and objects that would run if they were unpickled
    idle        a thousand connections that send nothing
    loris       a hundred that send a byte now and then
    impostors   no token, a wrong one, another cluster's id, TLS 1.2, a recorded handshake
    hoard       a client that is not a member sends valid messages for the server to buffer, or sends requests and never reads
                the responses
    forge       (serving) valid messages with the numbers of batches and sequences in flight

    attack, on an HTTP port (web.py); bombs, idle, loris and impostors (no key, a wrong one) are run there, too
    requests    damaged requests, one a connection
    bodies      bodies that are announced to be huge, and some without an end
    origins     every verb on every path, from pages of other sites and under other names (DNS rebinding)

Rules; if one is broken, the exit status is 1:

    the server closes every connection; no process dies; no code is executed
    a process grows by at most 16 MB                                                     (all attacks together)
    an announcement that is too large is refused within 10 ms, and costs less than 1 MB  (median; monsters, bodies)
    a connection without a handshake is closed after 5 s, one without an HTTP request after 10 (idle, loris)
    an impostor or a page of another site receives nothing but a refusal
    the work slows by at most 2 % under idle, loris and monsters, beyond the noise between quiet intervals

    training: no member joins or is lost, no gradient is refused, and the history is valid; the final weights are those of a run
              without attacks, to the last bit
    serving:  every request is answered, before, during and after, with the text that one process with all the weights gives;
              log probabilities stay the same to 0.001. No server returns 500, no log has a traceback

Only on Linux: /proc has memory and sockets of other processes. The attacking processes share the machine with the run, so a
flood slows it for lack of cores: that is shown, and breaks no rule.
"""
