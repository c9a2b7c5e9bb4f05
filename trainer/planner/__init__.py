"""What a recipe would take on a machine that nobody has to own yet: memory, micro-batch, time, traffic, reads.

`launch_scripts/plan.py --recipe R --ds_config D --world_size W [--gpu NAME]` and dry runs print it; no training imports it.
Nothing is materialised: the model lives on the meta device, where the trainer's own clipping runs on shapes alone (`probe.py`),
and the engines say what each rank would own (`trainer/engines/layouts.py`). Everything that is assumed rather than computed is
named in the result.
docs/planning.md compares it with measurements and with published figures.
"""
