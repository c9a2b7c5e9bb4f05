"""Scaling studies: grids of runs from one TOML file, resumed after interruptions, and compared."""
