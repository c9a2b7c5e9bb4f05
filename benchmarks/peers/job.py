"""Training runs of one system in a process of its own: what it is told, what it says, and how it is measured.

Standard library alone, because the JAX peer runs in an environment that has nothing of this project's.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

MICRO_BATCH = 256
"""The most examples whose gradients a system may hold at the same time."""


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        data: an `.npz` of x (n, 1, 28, 28) float32, y (n,) int64, x_test, y_test, and the starting weights by name.
        num_examples, expected_batch_size: n and B; the sampling rate is B / n.
        noise_multiplier: sigma; None asks the system to calibrate it by its own accountant, and for nothing else.
        network: of `torch_run.NETWORKS`; JAX has the small one alone.
    """

    system: str
    data: str
    epsilon: float
    delta: float
    num_examples: int
    expected_batch_size: int
    num_steps: int
    rate: float
    momentum: float
    max_grad_norm: float
    noise_multiplier: float | None = None
    network: str = "small"


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        sample_rate: as the system itself draws.
        accuracy: on the test pictures.
        seconds: processor time of the steps.
        start_seconds: processor time before the first step: checks and wrapping, and in a system's first run its imports and
            compilation.
        peak_mib: the high-water mark of the process during the run, interpreter and libraries included; `start_mib` before the
            first step.
    """

    system: str
    version: str
    sample_rate: float
    accuracy: float
    seconds: float
    start_seconds: float
    start_mib: float
    peak_mib: float


def peak_mib() -> float:
    """The high-water mark of this process since `Clock` began to look."""
    with open("/proc/self/status") as status:
        (kib,) = [line.split()[1] for line in status if line.startswith("VmHWM")]
    return int(kib) / 1024


class Clock:
    """Processor time and memory of this process, of one job."""

    def __init__(self) -> None:
        with open("/proc/self/clear_refs", "w") as marks:
            marks.write("5")  # the high-water mark is that of now (proc(5))
        self.start_seconds = self.start_mib = 0.0
        self._began = time.process_time()

    def begin(self) -> None:
        """Before the first step."""
        self.start_seconds, self.start_mib = self.seconds(), peak_mib()
        self._began = time.process_time()

    def seconds(self) -> float:
        return time.process_time() - self._began


def serve(calibrate: Callable[[Job], float], run: Callable[[Job, Clock], Outcome]) -> None:
    """Reads jobs from stdin, a line each, and prints sigma (where the job has none) or the outcome as a line of JSON each."""
    for line in sys.stdin:
        job = Job(**json.loads(line))
        print(json.dumps(calibrate(job) if job.noise_multiplier is None else asdict(run(job, Clock()))), flush=True)
