"""A shell on one of two hosts that are made of network namespaces: a first two-host run without a cluster. Needs root.

python -m tests.hosts             node1 and node2, both with sshd; a shell on node1, and `exit` takes them down
python -m tests.hosts COMMAND     one command instead, with its exit code
"""

import sys
import tempfile
from pathlib import Path

from tests.hosts.hosts import SSH_PROGRAMS, network, why_not


def main(command: list[str]) -> int:
    """Exit code 2 where hosts cannot be made."""
    if command in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    reason = why_not(*SSH_PROGRAMS)
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        network(Path(folder), "node1", "node2") as made,
    ):
        for host in made.hosts.values():
            host.start_sshd()
        if not command:
            print("node1 and node2 are up, this is node1; `exit` takes them down", flush=True)
        return made.hosts["node1"].attached(command or ["bash", "--norc"], PS1="[node1] $ ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
