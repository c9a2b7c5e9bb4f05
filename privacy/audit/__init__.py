"""Rechecking a run's claim: its ledger, its coins, the mechanism itself, and canaries. See `launch_scripts/audit.py`.

An audit can refute a claim or fail to; it never proves one. Everything here is arithmetic on numbers and files handed in by
`trainer/audit/`, which knows about models, engines and run folders.
"""
