"""The layers between two machines, from the lowest up, with known problems and remedies.

One table for the command and for docs/troubleshooting.md, which `python -m tools.reference docs` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Layer(StrEnum):
    NAME = "name"
    ROUTE = "route"
    FIREWALL = "firewall"
    PORT = "port"
    SERVER = "server"
    SSH = "ssh"
    MDNS = "mDNS"
    CLOCK = "clock"
    PYTHON = "Python"
    TORCH = "torch"
    DISK = "disk"
    GPU = "GPU driver"
    TOKEN = "token"


class Verdict(StrEnum):
    GOOD = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    layer: Layer
    verdict: Verdict
    what: str
    remedy: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class KnownProblem:
    """A message, its cause and the remedy."""

    sign: str
    cause: str
    remedy: str


TROUBLES: dict[Layer, list[KnownProblem]] = {
    Layer.NAME: [
        KnownProblem(
            "the name ... does not resolve",
            "the name is not in DNS, /etc/hosts or ~/.ssh/config",
            "use the address; between Macs and Linux machines with Avahi, NAME.local often works",
        )
    ],
    Layer.ROUTE: [
        KnownProblem(
            "no route to host, network is unreachable",
            "the machines are on different subnets, or a cable or Wi-Fi is down",
            "one subnet for each link; to reach one machine through another, `smolcluster up --dry-run` prints the route",
        ),
    ],
    Layer.FIREWALL: [
        KnownProblem(
            "no response in some seconds, although ssh to the machine works",
            "a firewall drops packets to that port",
            "Linux: sudo ufw allow PORT/tcp; macOS: System Settings, Network, Firewall, allow Python; Windows: "
            "New-NetFirewallRule -DisplayName smolcluster -Direction Inbound -Protocol TCP -LocalPort PORT -Action Allow",
        )
    ],
    Layer.PORT: [
        KnownProblem(
            "connection refused",
            "nothing listens there: the server is not started, listens on loopback only, or on another port",
            "start it with --bind 0.0.0.0 (and a token); look for `listening on` in what it prints",
        ),
        KnownProblem(
            "address already in use",
            "another program has the port, perhaps an earlier run",
            "smolcluster down; or choose another port, as cluster.port",
        ),
    ],
    Layer.SERVER: [
        KnownProblem(
            "not a smolcluster server",
            "another program has this port",
            "use the port that the server prints in `listening on`; the mesh plane has no server to check",
        ),
        KnownProblem(
            "the server speaks protocol version ...",
            "the machines have different versions of smolcluster",
            "install the same version of smolcluster on both",
        ),
    ],
    Layer.SSH: [
        KnownProblem(
            "the host key has CHANGED",
            "the machine was reinstalled, or another one has its address",
            "if you know why: ssh-keygen -R HOST, then connect once by hand",
        ),
        KnownProblem(
            "... is not in known_hosts",
            "ssh has never connected to it",
            "ssh HOST once, or use --accept-new of `cluster init`, `cluster check` and `up`",
        ),
        KnownProblem("does not accept your key", "your public key is not on that machine", "ssh-copy-id USER@HOST"),
        KnownProblem(
            "ssh to ... failed: Connection lost",
            "the peer closed the connection: the port is not that of ssh, or its sshd refuses",
            "see its messages: ssh -v HOST",
        ),
    ],
    Layer.MDNS: [
        KnownProblem(
            "machines that `join` are not found",
            "multicast is blocked: another subnet, a guest network, a VPN, a container",
            "use the address instead: smolcluster worker ... --server HOST:PORT",
        )
    ],
    Layer.CLOCK: [
        KnownProblem(
            "its clock is ... ahead",
            "no time service runs there, or a Raspberry Pi was off for a long time",
            "sudo timedatectl set-ntp true (macOS: sudo sntp -sS time.apple.com; Windows: w32tm /resync)",
        )
    ],
    Layer.PYTHON: [
        KnownProblem(
            "there is no Python, or it is older than 3.11",
            "ssh uses another PATH than a terminal",
            "install one, and set hosts.NAME.python in the cluster file",
        )
    ],
    Layer.TORCH: [
        KnownProblem(
            "machines have different versions of torch",
            "they were set up at different times",
            "install the same everywhere; `smolcluster up` does so if hosts.NAME.python is left out",
        )
    ],
    Layer.DISK: [
        KnownProblem(
            "... of disk are free, ... are needed",
            "checkpoints, caches, an environment (torch takes 1 to 5 GB)",
            "free some, or set hosts.NAME.folder to another disk; keep fewer: training.max_checkpoints_to_keep",
        )
    ],
    Layer.GPU: [
        KnownProblem(
            "there is an NVIDIA GPU, but torch cannot use it",
            "the driver does not run, or is older than the CUDA that torch was built for",
            "nvidia-smi must work first; then install a torch for that driver, or update it",
        )
    ],
    Layer.TOKEN: [
        KnownProblem(
            "the cluster token is missing or not the one used here",
            "the machines have different tokens, or one has none",
            "compare the ids: smolcluster token show; copy yours: smolcluster token show --secret | ssh HOST smolcluster "
            "token add",
        ),
        KnownProblem(
            "others may read the token file", "its permissions are too wide", "chmod 600 the file that is named"
        ),
    ],
}


def known_remedy(layer: Layer, number: int = 0) -> str:
    return TROUBLES[layer][number].remedy


def good(layer: Layer, what: str, *, host: str = "") -> Finding:
    return Finding(layer=layer, verdict=Verdict.GOOD, what=what, host=host)


def warning(layer: Layer, what: str, remedy: str = "", *, host: str = "") -> Finding:
    """`remedy`: what to do, where it is not the layer's first known remedy."""
    return Finding(layer=layer, verdict=Verdict.WARNING, what=what, remedy=remedy or known_remedy(layer), host=host)


def bad(layer: Layer, what: str, remedy: str = "", *, host: str = "") -> Finding:
    """`remedy`: what to do, where it is not the layer's first known remedy."""
    return Finding(layer=layer, verdict=Verdict.BAD, what=what, remedy=remedy or known_remedy(layer), host=host)
