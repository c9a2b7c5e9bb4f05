"""Acceptance on one GPU: `make gpu`, or `python -m tests.gpu`. `__main__.py` says how; every other module is one part."""
