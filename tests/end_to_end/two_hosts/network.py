"""Two hosts and a router on one machine, each a network namespace of its own.

    prefill 10.77.1.2 ── 10.77.1.1 router 10.77.2.1 ── 10.77.2.2 decode

Each host has a device more, with an address that the other one has too, as container bridges have.
The router limits the rate (tc tbf), loses packets (nftables, else iptables) and cuts the way (a
port goes down), so the hosts see what hosts see: a slow network, retransmissions, silence. Nothing
of it is in the machine's own network, so addresses are the same in every run and runs do not meet.
The test process reaches what listens on a host through `relay.py`, whatever the link does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ADDRESSES = {"prefill": "10.77.1.2", "decode": "10.77.2.2"}
_GATEWAYS = {"prefill": "10.77.1.1", "decode": "10.77.2.1"}
_NAMES = "hocket-test-"
# Packets may wait in the router for this long; beyond it they are dropped, as in any real one.
_LONGEST_QUEUE = "300ms"
_BURST = "16kb"


def why_not() -> str:
    """Why there can be no such network here; "" when there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for tool in ("ip", "tc", "setpriv"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (iproute2, util-linux) on this machine"
    probe = f"{_NAMES}{os.getpid()}-probe"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    try:
        link = ["ip", "-n", probe, "link", "add", "near", "type", "veth", "peer", "name", "far"]
        veth = subprocess.run(link, capture_output=True, text=True, check=False)
        return f"there is no veth here: {veth.stderr.strip()}" if veth.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False)


def why_no_loss() -> str:
    """Why packets can't be lost on purpose here; "" when they can."""
    if shutil.which("nft") or shutil.which("iptables"):
        return ""
    return "there is neither nft nor iptables on this machine"


class Network:
    """The two hosts. Nothing of it outlives `close`, nor, but for names, the test process."""

    def __init__(self) -> None:
        _delete_leftovers()
        self._prefix = f"{_NAMES}{os.getpid()}-{secrets.token_hex(2)}"
        self._router = f"{self._prefix}-router"
        self._relays: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._reached: dict[tuple[str, str], str] = {}

    def open(self) -> None:
        """Makes hosts, router and links. Call `close` whatever happens."""
        self._make(self._router)
        for host in ADDRESSES:
            self._make(self._namespace(host))
            self._connect(host)
        _run("ip", "netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1")

    def close(self) -> None:
        for relay in self._relays.values():
            relay.kill()
            relay.communicate()
        for name in (*map(self._namespace, ADDRESSES), self._router):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def command(self, host: str, *words: str) -> list[str]:
        """Runs `words` on a host; it dies with this process."""
        inside = ("ip", "netns", "exec", self._namespace(host), *words)
        return ["setpriv", "--pdeathsig", "KILL", *inside]

    def reach(self, host: str, address: str) -> str:
        """`address`, which something listens at on a host, as it is reached from here."""
        key = (host, address)
        if key not in self._reached:
            listener = socket.create_server(("127.0.0.1", 0))
            inner_host, _, port = address.rpartition(":")
            script = str(Path(__file__).with_name("relay.py"))
            words = (sys.executable, script, str(listener.fileno()), inner_host, port)
            relay = self._relays[key] = subprocess.Popen(
                self.command(host, *words), pass_fds=[listener.fileno()], stdout=subprocess.PIPE
            )
            assert relay.stdout is not None
            assert relay.stdout.readline() == b"ready\n", f"no relay to {address}"
            self._reached[key] = f"127.0.0.1:{listener.getsockname()[1]}"
            listener.close()
        return self._reached[key]

    def limit_rate(self, kbit_per_s: int) -> None:
        """Both ways."""
        for host in ADDRESSES:
            shape = ("rate", f"{kbit_per_s}kbit", "burst", _BURST, "latency", _LONGEST_QUEUE)
            self._tc("replace", "dev", host, "root", "tbf", *shape)

    def lose(self, percent: int) -> None:
        """That share of all packets, both ways."""
        if shutil.which("nft"):
            rule = f"numgen random mod 100 < {percent} drop"
            chain = f"chain lossy {{\n type filter hook forward priority 0;\n {rule}\n}}"
            self._on_router("nft", "-f", "-", text=f"table inet hocket {{\n{chain}\n}}\n")
            return
        share = ("--mode", "random", "--probability", str(percent / 100))
        self._on_router("iptables", "-A", "FORWARD", "-m", "statistic", *share, "-j", "DROP")

    def cut(self, host: str) -> None:
        """The router's port towards a host goes down: that host's link is dead, the other host
        sees nothing but silence."""
        _run("ip", "-n", self._router, "link", "set", host, "down")

    def mend(self) -> None:
        """The link is whole, fast and loses nothing."""
        for host in ADDRESSES:
            _run("ip", "-n", self._router, "link", "set", host, "up")
            self._tc("replace", "dev", host, "root", "pfifo")
        if shutil.which("nft"):
            self._on_router("nft", "flush", "ruleset")
        elif shutil.which("iptables"):
            self._on_router("iptables", "-F")

    def retransmitted(self, host: str) -> int:
        """TCP segments that the host had to send again, since it exists."""
        command = self.command(host, "cat", "/proc/net/snmp")
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        names, values = (
            line.split() for line in done.stdout.splitlines() if line.startswith("Tcp:")
        )
        return int(values[names.index("RetransSegs")])

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _connect(self, host: str) -> None:
        """The router's port to a host has the host's name. A way whose port is down ends in a
        black hole: a router that answers "unreachable" would be kinder than a cut cable."""
        name, router, gateway = self._namespace(host), self._router, _GATEWAYS[host]
        ends = ("eth0", "type", "veth", "peer", "name", host, "netns", router)
        _run("ip", "-n", name, "link", "add", *ends)
        _run("ip", "-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
        _run("ip", "-n", router, "addr", "add", f"{gateway}/24", "dev", host)
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", router, "link", "set", host, "up")
        _run("ip", "-n", name, "route", "add", "default", "via", gateway)
        _run("ip", "-n", name, "link", "add", "bridge0", "type", "veth", "peer", "name", "inside")
        _run("ip", "-n", name, "addr", "add", "172.17.0.1/16", "dev", "bridge0")
        for device in ("bridge0", "inside"):
            _run("ip", "-n", name, "link", "set", device, "up")
        hole = gateway.rpartition(".")[0] + ".0/24"
        _run("ip", "-n", router, "route", "add", "blackhole", hole, "metric", "1000")

    def _tc(self, *words: str) -> None:
        self._on_router("tc", "qdisc", *words)

    def _on_router(self, *words: str, text: str = "") -> None:
        _run("ip", "netns", "exec", self._router, *words, text=text)


def _run(*words: str, text: str = "") -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"


def _delete_leftovers() -> None:
    """Namespaces of test processes that were killed: their names hold the process's id."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for name in _names(listed.stdout.splitlines()):
        process_id = name.removeprefix(_NAMES).partition("-")[0]
        if process_id.isdecimal() and not Path(f"/proc/{process_id}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _names(lines: Sequence[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith(_NAMES)]
