import sys, time
import torch
from tests.trainer.test_audit_mechanism import audit
from trainer.ranks import distributed
device = distributed.start(distributed.Ranks())
t = time.process_time()
for bug in sys.argv[1:] or ["none"]:
    report = audit(device, (bug,))[bug]
    print(bug, report.verdict, report.failed())
    if bug == "none":
        print(report.to_text())
    print(time.process_time() - t); t = time.process_time()
