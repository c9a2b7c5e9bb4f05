"""Audits of a run's claim: its ledger and its coins. See `launch_scripts/audit.py`.

An audit can refute a claim or fail to; it never proves one. These audits calculate with numbers and
files; those that train, on canaries, are in trainer/audit/.
"""
