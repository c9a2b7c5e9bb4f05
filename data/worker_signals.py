"""Imported by the fork server of the data workers, for its effect: it and its workers leave stop signals to the trainer.

Launchers and schedulers signal the whole process tree. The trainer notes the request and stops at the next step boundary; until
then it needs its workers. They end with it in any case (`data.loader._end_with_parent`).
"""

import signal

for _number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_IGN)
