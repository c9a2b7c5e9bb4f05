"""Scaling studies: a grid of runs from one TOML file, run to the end however often it is interrupted, and compared."""
