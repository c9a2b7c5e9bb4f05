"""The numbers that a run promises: options, request, plan and releases; it loads no torch."""
