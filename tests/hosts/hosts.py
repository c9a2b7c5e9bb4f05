"""Hosts on one machine: each with a name, a network card, processes and a /run of its own, on one wire.

A host is a set of Linux namespaces around an init process. Files are shared, as on a cluster with a shared file system.
Killing the init process takes every process of the host with it, daemons included: that is how a node fails here, and how tests
clean up. Nothing is left in the machine's own network. The init processes also die with the test process.
"""

import os
import pwd
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.ranks import ROOT
from tests.e2e.launch import kill_group

NETWORK = "10.77.0"
SSH_PROGRAMS = ("sshd", "ssh", "ssh-keygen")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# Adopts orphans and buries them, as an init process does; `sleep` would leave zombies.
_INIT = """
import os, time
print("up", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.02)
"""


def find(program: str) -> str | None:
    return shutil.which(program, path=_PATH)


def why_not(*programs: str) -> str:
    """Why hosts cannot be made here, or an empty string."""
    if os.geteuid() != 0:
        return "needs root (network namespaces)"
    missing = [p for p in ("ip", "unshare", "nsenter", "setpriv", *programs) if find(p) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tests/install_packages.sh)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    return "" if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


class Host:
    """One host; `start` after a `kill` is a reboot."""

    def __init__(self, network: "Network", name: str, number: int) -> None:
        self.name, self.address = name, f"{NETWORK}.{number}"
        self._network, self._number = network, number
        self._unshare: subprocess.Popen[str] | None = None
        self.init = 0

    def start(self) -> None:
        files, home = self._network.folder, pwd.getpwuid(os.geteuid()).pw_dir
        setup = [
            f"hostname {self.name}",
            "ip link set lo up",
            "mount -t tmpfs tmpfs /run",
            "mkdir -p /run/sshd",
            f"mount --bind {files}/hosts /etc/hosts",
            f"mount --bind {files}/ssh_config /etc/ssh/ssh_config",
            # Whoever runs the tests may start anything in a shell: pyenv waits a minute for a lock that a killed host has left.
            f"for file in {home}/.bashrc {home}/.zshenv {home}/.ssh/config; do"
            f" [ ! -e $file ] || mount --bind {files}/nothing $file; done",
            f"exec {sys.executable} -c {shlex.quote(_INIT)}",
        ]
        self._unshare = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                "--net",
                "--uts",
                "--ipc",
                "--mount",
                "--pid",
                "--fork",
                "--mount-proc",
                "--kill-child",
                "sh",
                "-ec",
                "\n".join(setup),
            ],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=self._environment({}),
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "up\n", f"host {self.name} did not come up"
        pid = self._unshare.pid
        self.init = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        self._network.plug(self._number, self.init)

    def popen(
        self,
        command: Sequence[str],
        *,
        cwd: Path = ROOT,
        output: Path | None = None,
        **environment: str,
    ) -> subprocess.Popen[str]:
        """A process of this host, in a session of its own; `kill_group` ends it. Output goes to a pipe, or to a file."""
        target = output.open("a") if output is not None else subprocess.PIPE
        try:
            return subprocess.Popen(
                self._inside(command, cwd),
                stdout=target,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                env=self._environment(environment),
            )
        finally:
            if output is not None:
                target.close()  # type: ignore[union-attr]

    def _inside(self, command: Sequence[str], cwd: Path) -> list[str]:
        return [
            "nsenter",
            "-t",
            str(self.init),
            "-n",
            "-u",
            "-i",
            "-m",
            "-p",
            f"--wdns={cwd}",
            "--",
            *command,
        ]

    def attached(self, command: Sequence[str], **environment: str) -> int:
        """A command with our own terminal, from our own folder; its exit code."""
        more = self._environment({"TERM": os.environ.get("TERM", "dumb"), **environment})
        return subprocess.run(self._inside(command, Path.cwd()), env=more, check=False).returncode

    def run(
        self, command: Sequence[str], *, timeout: float = 120, cwd: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """To its end, with what it said."""
        process = self.popen(command, cwd=cwd, **environment)
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_group(process)
            said, _ = process.communicate()
            raise AssertionError(
                f"{shlex.join(command)}: no end within {timeout} s:\n{said[-4000:]}"
            ) from None
        finally:
            kill_group(process)
        return subprocess.CompletedProcess(command, process.returncode, said)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """What a login gives, not what the tests happen to run with."""
        keep = {k: v for k, v in os.environ.items() if k in ("HOME", "USER", "LANG", "TMPDIR")}
        return {"PATH": f"{Path(sys.executable).parent}:{_PATH}", **keep, **more}

    def start_sshd(self) -> None:
        self.popen(
            [str(find("sshd")), "-D", "-e", "-f", str(self._network.folder / "sshd_config")],
            output=self._network.folder / f"sshd-{self.name}.log",
        )
        wait_until(
            lambda: self.run(["ssh", self.name, "true"]).returncode == 0,
            f"sshd on {self.name}",
            within=20,
        )

    def kill(self) -> None:
        """Power off: its cable first, so that no process says good-bye, then all its processes at once."""
        if self._unshare is not None:
            self._network.unplug(self._number)
            kill_group(self._unshare)
            if self._unshare.stdout is not None:
                self._unshare.stdout.close()
            self._unshare = None


class Network:
    """The wire, and what all hosts share: names and keys."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.hosts = {name: Host(self, name, number + 1) for number, name in enumerate(names)}
        self._switch: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{h.address} {h.name}" for h in self.hosts.values())]
        (self.folder / "nothing").touch(mode=0o600)
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        # One key pair for hosts and root; nothing of the machine's own configuration is read or changed.
        key = self.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        (self.folder / "ssh_config").write_text(
            f"Host *\n IdentityFile {key}\n IdentitiesOnly yes\n StrictHostKeyChecking no\n"
            " UserKnownHostsFile /dev/null\n LogLevel ERROR\n ConnectTimeout 5\n"
        )
        (self.folder / "sshd_config").write_text(
            f"HostKey {key}\nAuthorizedKeysFile {key}.pub\nPidFile none\nUsePAM no\nStrictModes no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nPermitUserRC no\nUseDNS no\nMaxStartups 100\n"
        )
        switch = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"],
            start_new_session=True,
        )
        self._switch, own = switch, os.readlink("/proc/self/ns/net")
        wait_until(lambda: os.readlink(f"/proc/{switch.pid}/ns/net") != own, "a network of its own")
        self._ip(switch.pid, "link add br0 type bridge", "link set br0 up")
        for host in self.hosts.values():
            host.start()

    @staticmethod
    def _ip(inside: int, *commands: str) -> None:
        for command in commands:
            subprocess.run(
                ["nsenter", "-t", str(inside), "-n", str(find("ip")), *command.split()], check=True
            )

    def plug(self, number: int, init: int) -> None:
        """A cable from the switch to the card eth0 of a host."""
        assert self._switch is not None
        port = f"port{number}"
        card = f"eth0 address 02:00:00:00:00:{number:02x} netns {init}"  # the same after a reboot, as neighbours expect
        self._ip(
            self._switch.pid,
            f"link add {port} type veth peer name {card}",
            f"link set {port} master br0 up",
        )
        self._ip(init, f"addr add {NETWORK}.{number}/24 dev eth0", "link set eth0 up")

    def unplug(self, number: int) -> None:
        assert self._switch is not None
        self._ip(self._switch.pid, f"link del port{number}")


@contextmanager
def network(folder: Path, *names: str) -> Iterator[Network]:
    """Hosts with these names, gone at the end whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Network(folder, names)
    try:
        made.start()
        yield made
    finally:
        for host in made.hosts.values():
            host.kill()
        if made._switch is not None:
            kill_group(made._switch)


def wait_until(
    condition: Callable[[], object], what: str, within: float = 10, every: float = 0.05
) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"waited {within} s for {what}"
        time.sleep(every)
