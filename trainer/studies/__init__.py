"""Scaling studies: a grid of runs from one TOML file, resumed after any interruption, and compared."""
