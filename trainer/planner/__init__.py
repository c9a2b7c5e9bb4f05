"""Plans memory, micro-batch, time, traffic and reads of a recipe on a machine that need not exist.

`launch_scripts/plan.py --recipe R --ds_config D --world_size W [--gpu NAME]` and dry runs print the
plan. Nothing is materialised: the trainer's own clipping runs on the shapes of a meta model
(`probe.py`), and the engines say what each rank owns (`trainer/engines/layouts.py`). The plan names
its assumptions. docs/planning.md compares it with measurements and with published figures.
"""
