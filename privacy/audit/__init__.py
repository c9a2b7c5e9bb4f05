"""Rechecking a run's claim: its ledger, its coins, the mechanism itself, and canaries. See `launch_scripts/audit.py`.

An audit can refute a claim or fail to; it never proves one. `sandbox.py` runs real steps, of a loop of one's own or of the
trainer (`trainer/audit/`); everything else here is arithmetic on numbers and files.
"""
