"""Slurm on hosts of tests/hosts/hosts.py: munge, a controller on the first host, a slurmd on each of the others."""

import secrets
from pathlib import Path

from tests.hosts.hosts import Host, Network, find, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

# Two partitions on the same nodes: a job in `urgent` preempts one in `train`, which Slurm then requeues. Timeouts are short, so
# that a lost node is noticed within seconds; cred_expire is also how long a requeued job waits.
_CONFIG = """
ClusterName=test
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldParameters=reboot_from_controller
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PropagateResourceLimits=NONE
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=8
MessageTimeout=5
KillWait=30
SchedulerParameters=sched_interval=1,sched_min_interval=200000,batch_sched_delay=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=8 State=UNKNOWN
PartitionName=train Nodes={nodes} Default=YES PriorityTier=1 OverSubscribe=EXCLUSIVE GraceTime=60 MaxTime=INFINITE
PartitionName=urgent Nodes={nodes} PriorityTier=10 OverSubscribe=EXCLUSIVE PreemptMode=OFF MaxTime=INFINITE
"""


class Slurm:
    """Commands run on the head, with the project's root as their folder."""

    def __init__(self, network: Network, head: str) -> None:
        self.folder = network.folder / "slurm"
        self.head = network.hosts[head]
        self.nodes = [host for host in network.hosts.values() if host is not self.head]

    def start(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(
            _CONFIG.format(
                head=self.head.name,
                head_address=self.head.address,
                folder=self.folder,
                nodes=",".join(host.name for host in self.nodes),
            )
        )
        self._start_munge(self.head)
        self._daemon(self.head, "slurmctld", "-D", "-i")
        for host in self.nodes:
            self.start_node(host)
        self.wait_for_nodes()

    def start_node(self, host: Host) -> None:
        self._start_munge(host)
        self._daemon(host, "slurmd", "-D", "-N", host.name)

    def _start_munge(self, host: Host) -> None:
        files = self.folder / f"munge-{host.name}"
        files.mkdir(mode=0o700, exist_ok=True)
        # As root, with a key of its own, apart from whatever the machine has.
        self._daemon(
            host,
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--log-file={files}/log",
            f"--pid-file={files}/pid",
            f"--seed-file={files}/seed",
            "--socket=/run/munge/munge.socket.2",
        )
        wait_until(lambda: host.run(["munge", "-n"]).returncode == 0, f"munge on {host.name}")

    def _daemon(self, host: Host, program: str, *options: str) -> None:
        host.run(["mkdir", "-p", "/run/munge"])
        host.popen(
            [str(find(program)), *options],
            output=self.folder / f"{program}-{host.name}.out",
            SLURM_CONF=str(self.folder / "slurm.conf"),
        )

    def run(
        self, *command: str, check: bool = True, timeout: float = 60, **environment: str
    ) -> str:
        """Output of one of Slurm's commands on the head."""
        result = self.head.run(
            command,
            timeout=timeout,
            SLURM_CONF=str(self.folder / "slurm.conf"),
            OMP_NUM_THREADS="1",
            **environment,
        )
        assert not check or result.returncode == 0, f"{command}: {result.stdout}\n{self.logs()}"
        return result.stdout.strip()

    def submit(self, *arguments: str, **environment: str) -> str:
        return self.run("sbatch", "--parsable", *arguments, **environment)

    def job(self, number: str) -> dict[str, str]:
        """`scontrol show job`, as a dictionary."""
        said = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def state(self, number: str) -> str:
        return self.job(number)["JobState"]

    def has_ended(self, number: str) -> bool:
        return self.state(number) in ENDED

    def environments(self) -> list[bytes]:
        """Of every process on the hosts."""
        found = []
        for host in (self.head, *self.nodes):
            spaces = Path(f"/proc/{host.init}/ns/pid")
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    if (process / "ns" / "pid").readlink() == spaces.readlink():
                        found.append((process / "environ").read_bytes())
                except OSError:
                    continue  # it has ended
        return found

    def wait_for_nodes(self, within: float = 30) -> None:
        wait_until(
            lambda: (
                self.run("sinfo", "-h", "-N", "-p", "train", "-o", "%T", check=False).split()
                == ["idle"] * len(self.nodes)
            ),
            f"idle nodes:\n{self.logs()}",
            within=within,
            every=0.1,
        )

    def logs(self) -> str:
        parts = [
            f"== {p.name}\n{p.read_text(errors='replace')[-2500:]}"
            for p in sorted(self.folder.glob("*.out"))
        ]
        return "\n".join(parts)
