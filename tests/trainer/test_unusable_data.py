"""Data that the recipe cannot use are refused before the ledger is opened, in one line for the console alone."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.index.build import build_index
from data.index.tar_writer import write_shard
from evaluation.sources import encode_png
from tests.distributed.ranks import ROOT
from tests.e2e.launch import RECIPE
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.ranks.discovery import Ranks
from trainer.run import datasets
from trainer.run.datasets import require_usable
from trainer.run.start import train
from trainer.tasks import make_task

pytestmark = pytest.mark.usefixtures("trusted_models", "one_rank")

MACHINE = load_machine_settings(ROOT / "ds_configs" / "zero1.json")
RECIPES = {
    "captioner": [],
    "classifier": [
        "model.kind=classifier",
        "model.overrides={num_classes = 10, patch_size = 8, encoder_width = 16, encoder_depth = 1}",
        "data.label_field=label",
    ],
    "masked_autoencoder": [
        "model.kind=masked_autoencoder",
        "model.overrides={patch_size = 8, encoder_width = 16, encoder_depth = 1, decoder_width = 16, decoder_depth = 1}",
    ],
}


def picture(seed: int) -> bytes:
    return encode_png(np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8))


def shard(path: Path, good: int, bad: int) -> Path:
    """Pictures with captions and labels in a json member; the bad ones come last and lack all three."""

    def examples() -> Iterator[tuple[str, dict[str, bytes]]]:
        for number in range(good):
            record = {
                "sentence": f"picture {number} of SECRET",
                "caption": "a picture",
                "label": number % 10,
            }
            yield f"{number:04d}", {"png": picture(number), "json": json.dumps(record).encode()}
        for number in range(good, good + bad):
            yield f"{number:04d}", {"png": b"no picture", "json": b"{}"}

    write_shard(path, examples())
    return path


def write_captions(path: Path, captions: list[str]) -> None:
    """Forty pictures with these captions in turn."""
    names = [captions[number % len(captions)] for number in range(40)]
    write_shard(
        path,
        ((f"{n:04d}", {"png": picture(n), "txt": name.encode()}) for n, name in enumerate(names)),
    )


@pytest.fixture
def start(
    tmp_path: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    monkeypatch.setattr(
        fcntl, "flock", lambda *arguments: None
    )  # held until the process ends, and this one resumes

    def run(*overrides: str, heldout: Path | None = None) -> int:
        named = [
            f"data.shards={tmp_path}/mine.tar",
            f"heldout.shards={heldout or tmp_path / 'mine.tar'}",
        ]
        small = [
            "heldout.is_public=false",
            "privacy.expected_batch_size=4",
            "train.num_steps=1",
            "data.num_workers=0",
            "privacy.clipping_mode=bookkeeping",
        ]
        given = {override.partition("=")[0] for override in overrides}
        small = [override for override in small if override.partition("=")[0] not in given]
        config = load_config(ROOT / RECIPE, [*named, *small, *overrides])
        return train(config, MACHINE, "local", tmp_path / "run", ROOT, Ranks(), one_rank)

    return run


def refused(
    start: Callable[..., int], run: Path, *overrides: str, heldout: Path | None = None
) -> str:
    with pytest.raises(DataError) as caught:
        start(*overrides, heldout=heldout)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not (run / "ledger.jsonl").exists() and not (run / "private/sampling.key").exists()
    public = [
        p for p in run.rglob("*") if p.is_file() and "private" not in p.relative_to(run).parts
    ]
    assert public == [], "nothing that depends on data is written to the public folder"
    return str(caught.value)


@pytest.mark.parametrize("kind", ["captioner", "classifier"])
def test_a_misspelt_field_names_the_fields_that_there_are(
    kind: str, tmp_path: Path, start: Callable[..., int]
) -> None:
    shard(tmp_path / "mine.tar", 40, 0)
    key = {"captioner": "data.caption_field", "classifier": "data.label_field"}[kind]
    said = refused(
        start,
        tmp_path / "run",
        *[o for o in RECIPES[kind] if not o.startswith(key)],
        f"{key}=sentance",
    )
    assert f"{key} is 'sentance'" in said and "data.shards" in said
    assert all(
        name in said
        for name in ("'sentence' of .json", "'caption' of .json", "'label' of .json", ".png")
    )
    assert "SECRET" not in said, "names of fields, not what is in them"


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        pytest.param(
            kind, good, bad, marks=[pytest.mark.full] if kind != "captioner" and good != 14 else []
        )
        for kind in RECIPES
        for good, bad in ((0, 1), (0, 300), (14, 16), (130, 170))
    ],
)
def test_most_unusable_is_refused(
    kind: str, good: int, bad: int, tmp_path: Path, start: Callable[..., int]
) -> None:
    shard(tmp_path / "mine.tar", good, bad)
    assert "cannot be used" in refused(start, tmp_path / "run", *RECIPES[kind])


def write_labels(path: Path, labels: list[int], bad: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Pictures with these labels; those of the numbers `bad` cannot be decoded, each in its own way."""
    write_shard(
        path,
        (
            (
                f"{n:04d}",
                {
                    "png": (b"", b"no", picture(n)[:60])[n % 3] if n in bad else picture(n),
                    "cls": b"%d" % label,
                },
            )
            for n, label in enumerate(labels)
        ),
    )


CLASSES = [part for part in RECIPES["classifier"] if not part.startswith("data.label_field")]
LABELS = {
    "labels from 1": (
        [1 + n % 10 for n in range(200)],
        set(),
        r"20 of 200 .* all that have one label, cannot be used",
    ),
    "labels from 1, few of the last": (
        [1 + n % 9 for n in range(300)] + [10, 10],
        set(),
        "2 of 302 .* all that have one label",
    ),
    "a class of broken pictures": (
        [n % 9 for n in range(300)] + [9, 9],
        {300, 301},
        "2 of 302 .* all that have one label",
    ),
    "2 % of one reason": ([n % 10 for n in range(150)], {7, 77, 149}, "3 of 150 examples"),
    "1 in 50": ([n % 10 for n in range(500)], set(range(3, 500, 50)), "10 of 500 examples"),
}


def look(tmp_path: Path, labels: list[int], bad: set[int], *overrides: str) -> None:
    """What a start does with the pictures of `write_labels`, and nothing else of it."""
    write_labels(tmp_path / "mine.tar", labels, bad)
    config = load_config(ROOT / RECIPE, [f"data.shards={tmp_path}/mine.tar", *CLASSES, *overrides])
    table = build_index([tmp_path / "mine.tar"], tmp_path / "index")
    require_usable(
        table, make_task(config, ROOT).make_example(train=True), config, key="data.shards"
    )


@pytest.mark.parametrize("what", LABELS)
def test_a_class_that_is_lost_or_more_than_one_percent_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a label in the line, and with the way to say that it is meant; without privacy it is only said."""
    labels, bad, message = LABELS[what]
    monkeypatch.setattr(datasets, "SAMPLE_SIZE", 600)  # else the second look depends on the first
    with pytest.raises(DataError, match=message) as caught:
        look(tmp_path, labels, bad)
    assert "data.max_unusable_share=0.5" in str(caught.value) and "\n" not in str(caught.value)
    for way in (
        ["data.max_unusable_share=0.5"],
        ["privacy.enabled=false", "data.provenance=public"],
    ):
        look(tmp_path, labels, bad, *way)
        assert len(said_of(capsys.readouterr().out, "data.shards")) == 1


@pytest.mark.parametrize(
    ("labels", "bad"),
    [
        ([n % 10 for n in range(60)], {7}),  # one alone
        ([n % 10 for n in range(250)], {7, 17}),  # of one label, which others have
        ([n % 10 for n in range(250)], {7, 18}),
        ([n % 2 for n in range(1200)], {*range(0, 1200, 150)}),  # eight of a thousand
    ],
)
def test_few_unusable_examples_of_any_label_are_said(
    labels: list[int],
    bad: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(datasets, "SAMPLE_SIZE", 300)
    look(tmp_path, labels, bad)
    assert "cannot be used and count as zero" in said_of(capsys.readouterr().out, "data.shards")[0]


def test_where_one_of_a_few_examples_is_unusable_more_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of 2,000 is one of the 64; alone it is 0.1 %. With others, which the first look may miss, it is refused."""
    labels = [n % 10 for n in range(2000)]
    look(tmp_path, labels, {0})
    line = "warning: data.shards: a look at 1000 examples: 1 cannot be used and count as zero"
    assert said_of(capsys.readouterr().out, "data.shards")[0].startswith(line)
    with pytest.raises(
        DataError, match=r"\d+ of 1000 examples that were looked at, cannot be used"
    ):
        look(tmp_path, labels, {0, *range(100, 2000, 40)})


def test_labels_from_one_are_refused_before_anything_is_charged(
    tmp_path: Path, start: Callable[..., int]
) -> None:
    write_labels(tmp_path / "mine.tar", [1 + n % 10 for n in range(100)])
    assert "all that have one label" in refused(start, tmp_path / "run", *CLASSES)


def said_of(text: str, key: str) -> list[str]:
    return [line for line in text.replace("\n  ", " ").splitlines() if f"{key}: a look at" in line]


@pytest.mark.parametrize(
    "kind", ["captioner", *(pytest.param(k, marks=pytest.mark.full) for k in (*RECIPES,)[1:])]
)
def test_some_unusable_examples_train_as_zero_gradients_and_every_start_counts_them(
    kind: str, tmp_path: Path, start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    shard(tmp_path / "mine.tar", 24, 20)
    line = "warning: data.shards: a look at 44 examples: 20 cannot be used and count as zero (20 times: the "
    meant = "data.max_unusable_share=0.5"
    assert start(*RECIPES[kind], meant, "train.max_minutes=1e-9") == 7
    assert [
        found.startswith(line) for found in said_of(capsys.readouterr().out, "data.shards")
    ] == [True]
    assert start(*RECIPES[kind], meant) == 0, "resumed"
    out = capsys.readouterr().out
    assert [found.startswith(line) for found in said_of(out, "data.shards")] == [True]
    public = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and "private" not in p.parts]
    assert not [
        p.name for p in public if b"cannot be used" in p.read_bytes() and p.name != "verify.py"
    ]


def test_a_step_without_a_usable_gradient_is_said(
    tmp_path: Path, start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that overflowed: every further step would spend budget on noise alone."""
    shard(tmp_path / "mine.tar", 40, 0)
    late = [
        "optimizer.name=sgd",
        "optimizer.momentum=0.0",
        "optimizer.peak_lr=1e6",
        "schedule.warmup_steps=0",
    ]
    assert (
        start(
            *late, "train.num_steps=2", "privacy.expected_batch_size=20", "heldout.num_captions=0"
        )
        == 0
    )
    lines = [
        line
        for line in capsys.readouterr().out.replace("\n  ", " ").splitlines()
        if "noise alone" in line
    ]
    assert lines and all(
        "gradients that are not finite, 0 that cannot be used" in line for line in lines
    )
    assert lines[0].startswith("warning: step 2 was noise alone: all its ")


@pytest.mark.parametrize("bound", [pytest.param("1.0", marks=pytest.mark.full), "1e7"])
def test_a_bound_far_above_all_gradients_is_said_once_and_never_published(
    bound: str, tmp_path: Path, start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    shard(tmp_path / "mine.tar", 40, 0)
    few = ["train.num_steps=2", "privacy.expected_batch_size=20", "heldout.num_captions=0"]
    assert start(*few, f"privacy.max_grad_norm={bound}") == 0
    out = capsys.readouterr().out
    assert out.count("give a much smaller privacy.max_grad_norm") == (bound == "1e7")
    public = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and "private" not in p.parts]
    assert not [p.name for p in public if b"much smaller privacy" in p.read_bytes()]


def test_held_out_data_are_looked_at_too(
    tmp_path: Path, start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as they are used: the first `heldout.num_examples`."""
    shard(tmp_path / "mine.tar", 40, 0)
    other = shard(tmp_path / "heldout.tar", 3, 100)
    assert "heldout.shards" in refused(start, tmp_path / "run", heldout=other)
    assert start("heldout.num_examples=3", heldout=other) == 0
    assert said_of(capsys.readouterr().out, "heldout.shards") == []
    assert start("heldout.num_examples=5", heldout=other) == 0
    assert (
        "a look at 5 examples: 2 cannot be used and are left out (2"
        in said_of(capsys.readouterr().out, "heldout.shards")[0]
    )


FASHION = "data.tokenizer=data/tokenizer/fashion.json"


def test_a_vocabulary_that_does_not_know_the_captions_is_refused(
    tmp_path: Path, start: Callable[..., int]
) -> None:
    """As of `train.py data.shards=mine` with the default recipe, whose vocabulary is the quickstart's twenty tokens."""
    for captions in (
        ["SECRET dogs bark"],
        ["a pair of SECRET dogs in rain", "dogs bark"],
        ["a SECRET 犬が走る", "雨"],
    ):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        write_captions(tmp_path / "mine.tar", captions)
        said = refused(start, tmp_path / "run", FASHION)
        assert (
            "data.shards" in said
            and "data.tokenizer" in said
            and "fashion.json" in said
            and "SECRET" not in said
        )
    assert start() == 0, "the embedded vocabulary knows parts of every word"
