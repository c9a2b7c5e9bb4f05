"""Rechecking a run's claim: its ledger and its coins. See `launch_scripts/audit.py`.

An audit can refute a claim or fail to; it never proves one. Everything here is arithmetic on numbers and files; audits that
train, on canaries, are in trainer/audit/.
"""
