"""Cases that once ended in a traceback, with the exit code that each must have."""

from dataclasses import replace

from tests.fuzz import values
from tests.fuzz.cases import MACHINE, Case, made_toml, tiny

TRAIN = "--engine local --ds_config {case}/machine.json --recipe {case}/recipe.toml --run_dir {case}/new"
DEEP = values.Raw("[" * 30_000 + "]" * 30_000)


def _case(script: str, line: str, *more: str, machine: str = values.to_json(MACHINE), **recipe: object) -> Case:
    return Case(script, [*line.split(), *more], made_toml(tiny() | recipe), machine.encode(), b"")


def _train(*more: str) -> Case:
    return _case("train", TRAIN, *more)


KNOWN: dict[str, tuple[Case, int]] = {
    "deeply nested ds_config": (
        _case("train", TRAIN, machine='{"zero_optimization":' * 30_000 + "1" + "}" * 30_000),
        2,
    ),
    "deeply nested recipe": (_case("train", TRAIN, deep=DEEP), 2),
    "deeply nested override": (_train(f"train.seed={DEEP[:90_000]}"), 2),
    "a model wider than any": (_train("model.overrides.encoder_width=1000000000000"), 2),
    "a model larger than this machine": (
        _train("model.overrides.encoder_width=131072", "model.overrides.encoder_depth=24"),
        2,
    ),
    "shards by ftp": (_train("data.shards=ftp://host/a.tar"), 2),
    "a picture of a million pixels a side": (_train("data.image_size=1000000"), 2),
    "a caption field that is no UTF-8": (_train("data.caption_field=\udcff"), 2),
    "more noise than a float holds": (_train("privacy.noise_multiplier=1e308"), 2),
    "a micro-batch of a thousand million": (_train("train.micro_batch_size=1000000000"), 2),
    "a seed of 77 bits": (_train("train.seed=100000000000000000000000"), 2),
    "a seed that is no integer": (_train("train.seed=1e23"), 2),
    "a rendezvous for no number of seconds": (_train("--rendezvous_seconds", "nan"), 2),
    "a rendezvous for ever": (_train("--rendezvous_seconds", "inf"), 2),
    "a run folder of 3,000 characters": (_case("train", TRAIN.replace("{case}/new", "{case}/" + "x" * 3000)), 2),
    "a run folder of 1,500 folders": (_case("train", TRAIN.replace("{case}/new", "{case}/" + "x/" * 2500)), 2),
    "a report of a run folder of 3,000 characters": (_case("report", "--run_dir " + "x" * 3000), 2),
    "an audit of a run folder of 3,000 characters": (_case("audit", "ledger --run_dir " + "x" * 3000), 2),
    "the smallest epsilon": (
        _case("plan", "--num_examples 60000 --expected_batch_size 600 --num_steps 1000 --target_epsilon 1e-9"),
        2,
    ),
    "more noise than an accountant resolves": (
        _case("plan", "--num_examples 60000 --expected_batch_size 600 --num_steps 1000 --noise_multiplier 4e5"),
        2,
    ),
    "features into a folder that takes no files": (
        _case("evaluate", "features --checkpoint {case}/run --data arrays:{made}/digits.npz --output {case}/readonly"),
        2,
    ),
    "results into a folder that takes no files": (
        _case("evaluate", "zero-shot --checkpoint {case}/run --synthetic_shapes 4 --output {case}/readonly"),
        2,
    ),
    "shards by a product of ranges": (_train("data.shards={0..9999999}{0..9999999}{0..9999999}.tar"), 2),
    "a number of 5,000 digits": (_train(f"data.memory_limit_mib={values.DIGITS}"), 2),
    "a file of other things as weights": (_case("export", "--import vip {made}/words {case}/new --size vip_nano"), 2),
    "an epsilon that fills the memory": (
        _case(
            "plan",
            "--num_examples 3000 --expected_batch_size 60 --num_steps 100000000 --noise_multiplier 1 --no_extras",
        ),
        2,
    ),
    "no memory for the threads of a process group": (replace(_train(), conditions=["memory 235"]), 1),
}
SLOW = {"shards by a product of ranges"}
