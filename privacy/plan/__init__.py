"""What a run promises, in numbers: options, request, plan, releases. Nothing here loads torch or knows the mechanism."""
