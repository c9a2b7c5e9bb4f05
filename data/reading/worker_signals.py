"""Makes data workers and their fork server leave stop signals to the trainer.

Launchers and schedulers signal the whole process tree. The trainer notes the request and stops at
the next step boundary; until then it needs its workers, which end with the trainer in any case
(`data.reading.workers.end_with_parent`). The import is enough for the fork server; a worker calls
`leave_to_trainer` again, because torch installs a handler of its own before the worker runs.
"""

import signal


def leave_to_trainer() -> None:
    """Ignores the signals that ask the process tree to stop."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


leave_to_trainer()
