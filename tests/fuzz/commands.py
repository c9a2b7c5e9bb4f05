"""Every command with command lines that work, and the options that its own parser knows."""

import argparse
import importlib
from collections.abc import Iterator
from unittest import mock

SCRIPTS = ("train", "plan", "prepare", "evaluate", "export", "audit", "report", "study", "shared_ledger")

LABELLED = "--train arrays:{made}/digits.npz --test arrays:{made}/digits.npz"
WORKING: dict[str, tuple[str, ...]] = {
    "train": (
        "--engine local --ds_config {case}/machine.json --recipe {case}/recipe.toml --run_dir {case}/new",
        "--engine local --ds_config {case}/machine.json --recipe {case}/recipe.toml --run_dir {case}/run",
    ),
    "plan": (
        "--num_examples 3000 --expected_batch_size 60 --num_steps 50 --noise_multiplier 1.0 --no_extras --json",
        "--num_examples 3000 --expected_batch_size 60 --num_steps 50 --target_epsilon 8 --delta 1e-5 --no_extras",
        "--num_examples 3000 --expected_batch_size 60 --num_steps 50 --noise_multiplier 1.0 --bands 2 --no_extras",
        "--recipe {case}/recipe.toml data.num_examples=3000 --no_extras --json",
        "--recipe {case}/recipe.toml --ds_config {case}/machine.json --gpu cpu --world_size 2 --bytes_per_example 3e4",
    ),
    "prepare": (
        "index data/demo/heldout-00000.tar --output {case}/new --workers 1",
        "verify data/demo/heldout-00000.tar --index {made}/index --workers 1",
        "verify data/demo/heldout-00000.tar --index {made}/index --sample 3 --workers 1",
        "import {made}/pictures --from folder --output {case}/new --workers 1 --size 16",
        "import {made}/table.csv --from csv --output {case}/new --workers 1 --size 16",
        "synthetic --output {case}/new --num_examples 2 --image_size 16 --workers 1 --backend numpy",
        "synthetic --preview {case}/new.png --num_examples 2 --image_size 16 --backend numpy",
        "tokenizer --words {made}/words --output {case}/tokenizer.json",
        "demo --source {made}/pictures --words {made}/words --output {case}/new",
    ),
    "evaluate": (
        "features --checkpoint {case}/run --data arrays:{made}/digits.npz",
        f"linear-probe --checkpoint {{case}}/run {LABELLED} --epochs 1 --num_folds 2",
        f"few-shot --checkpoint {{case}}/run {LABELLED} --shots 1 --num_splits 1",
        f"private-head --checkpoint {{case}}/run {LABELLED} --target_epsilon 8 --num_classes 2",
        "zero-shot --checkpoint {case}/run --synthetic_shapes 4",
        "dense --checkpoint {case}/run --task segmentation --train synthetic:1:2 --test synthetic:2:1 --epochs 1 --image_size 32",
        "aro --checkpoint {case}/run --synthetic shapes --synthetic_tests 4",
        "captions --checkpoint {case}/run --data shards:data/demo/heldout-00000.tar --max_examples 2",
        "captions --checkpoint {case}/run --data folder:{made}/pictures --num_beams 2 --max_examples 2 --output {case}/new",
    ),
    "export": (
        "--checkpoint {case}/run --format safetensors {case}/new",
        "--checkpoint {case}/run --format hf {case}/new --json",
        "--import vip {made}/words {case}/new --size vip_nano",
    ),
    "audit": (
        "ledger --run_dir {case}/run --json",
        "schedule --run_dir {case}/run",
        "canaries --output {case}/new --num_canaries 20 --image_size 16",
        "run --run_dir {case}/run --canaries {made}/canaries",
    ),
    "report": ("--run_dir {case}/run --json",),
    "study": (
        "run {case}/study.toml --study_dir {case}/new --executor script",
        "report --study_dir {case}/run",
    ),
    "shared_ledger": (
        "create {case}/new.jsonl --target_epsilon 8 --delta 1e-9",
        "show {made}/shared.jsonl --json",
    ),
}
"""Command lines that end with 0, or with one line. {made} is what all cases share, {case} the case's own folder."""


class _Found(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(script: str) -> argparse.ArgumentParser:
    """The parser that a script makes."""

    def caught(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Found(self)

    parser = argparse.ArgumentParser
    with mock.patch.object(parser, "parse_args", caught), mock.patch.object(parser, "parse_intermixed_args", caught):
        try:
            importlib.import_module(f"launch_scripts.{script}").parse_args([])
        except _Found as found:
            return found.parser
    raise AssertionError(f"{script} parses nothing")


def options(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.Action]]:
    """Options with the subcommand that they belong to; argparse has no public list of them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from options(sub, (*path, name))
        elif action.option_strings and action.dest != "help":
            yield path, action
