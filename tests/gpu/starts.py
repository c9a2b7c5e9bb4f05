"""The main job under every shipped ds_config and engine: exit code, steps and ledger."""

import time
from collections.abc import Iterator
from typing import get_args

from tests.e2e.launch import TRAIN, count, train_arguments
from tests.gpu.checks import Check, Setting, start
from tests.processes import ROOT
from trainer.config.recipe import EngineName

DS_CONFIGS = sorted(path.name for path in (ROOT / "ds_configs").glob("*.json"))
REFUSED = {
    "fairscale": {name for name in DS_CONFIGS if name.startswith("zero3")},
    "local": {"zero3_init_bf16.json", "zero3_offload.json", "zero3_offload_bf16.json"},
    "fsdp": {"zero3_init_bf16.json"},
    "deepspeed": set[str](),
}
"""What ds_configs/README.md says that an engine cannot do."""
STEPS = 3
AT_ONCE = 4
"""Runs that share the GPU; each needs well under 1 GiB of it."""


def checks(setting: Setting) -> Iterator[Check]:
    ds_configs = setting.choose(DS_CONFIGS, ["zero1_bf16.json"])
    waiting = [(ds_config, engine) for ds_config in ds_configs for engine in get_args(EngineName)]
    running = {}
    while waiting or running:
        while waiting and len(running) < setting.choose(AT_ONCE, 2):
            case = ds_config, engine = waiting.pop(0)
            run_dir = setting.folder / f"{engine}-{ds_config}"
            settings = [f"train.num_steps={STEPS}", "heldout.num_captions=1"]
            arguments = train_arguments(
                run_dir, "--engine", engine, *settings, ds_config=f"ds_configs/{ds_config}"
            )
            running[case] = (
                run_dir,
                start(setting.device.type, TRAIN, *arguments, log=run_dir.with_suffix(".log")),
            )
        time.sleep(0.1)
        for ds_config, engine in [
            case for case, (_, process) in running.items() if process.poll() is not None
        ]:
            run_dir, process = running.pop((ds_config, engine))
            refused, code = ds_config in REFUSED[engine], process.returncode
            steps = {kind: count(run_dir, kind) for kind in ("intent", "done")}
            holds = (
                code == 2 and not run_dir.exists()
                if refused
                else code == 0 and set(steps.values()) == {STEPS}
            )
            end = (
                {}
                if holds
                else {"log": run_dir.with_suffix(".log").read_text().strip().splitlines()[-8:]}
            )
            expected = (
                "refused with exit 2 before a run folder exists"
                if refused
                else f"exit 0, {STEPS} intents, {STEPS} done"
            )
            yield Check(
                f"start, {engine}, {ds_config}", holds, {"exit": code, **steps, **end}, expected
            )
