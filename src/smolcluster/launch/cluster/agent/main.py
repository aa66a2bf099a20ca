"""Read requests from standard input, write replies to standard output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from smolcluster.launch.cluster.agent.base import AgentError, say
from smolcluster.launch.cluster.agent.environment import environment, version_of
from smolcluster.launch.cluster.agent.files import has, keep_secret, read, tail, unpack
from smolcluster.launch.cluster.agent.following import copy, follow
from smolcluster.launch.cluster.agent.machine import inspect, listen, probe
from smolcluster.launch.cluster.agent.processes import begin, start, states, stop

OPERATIONS = {
    operation.__name__: operation
    for operation in (
        *(inspect, version_of, listen, probe, unpack, has, keep_secret, read, tail, environment),
        *(begin, start, states, follow, copy, stop),
    )
}


def main() -> None:
    os.umask(0o077)
    if os.name == "posix":  # not in the PATH of a non-login shell
        extra = ["/opt/homebrew/bin", "/usr/local/bin", str(Path.home() / ".local/bin")]
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *extra])
    for line in sys.stdin.buffer:
        request = json.loads(line)
        operation = OPERATIONS[request.pop("op")]
        size = request.pop("bytes", None)
        if size is not None:
            request["data"] = sys.stdin.buffer.read(size)
        try:
            say(result=operation(**request))
        except AgentError as error:
            say(error=str(error), remedy=error.remedy)
        except BrokenPipeError:
            return
        except OSError as error:
            say(error=f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else ""), remedy="")
