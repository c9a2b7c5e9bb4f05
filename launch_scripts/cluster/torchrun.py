"""Runs torchrun and ends as its ranks end: with their exit code and their line on the console.

    python launch_scripts/cluster/torchrun.py --nproc_per_node 8 launch_scripts/train.py ARGUMENTS

It takes torchrun's own options. The command `torchrun` ends with 1 and a traceback whatever its
ranks say, also if they saved and ended with 7 on request; a scheduler cannot tell that from a
crash.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.config.environment import require_packages

require_packages()

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main, parse_args

from privacy.errors import STOPPED_EARLY


def run(arguments: list[str]) -> int:
    """Runs torchrun's agent on this host and returns the first exit code above 0 of a rank."""
    if parse_args(arguments).max_restarts > 0:
        # The agents share a store on the host of rank 0. When that host is lost, agents of torch
        # 2.13 still send ranks there.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {rank} was ended by {name}; the same command resumes", file=sys.stderr)
        return 1
    except SignalException:
        # The agent has passed the signal on and has waited until its ranks had ended.
        return STOPPED_EARLY
    except (RendezvousError, DistError) as error:
        # No agent answers at the endpoint, or its port is taken.
        print(f"error: the agents did not meet: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
