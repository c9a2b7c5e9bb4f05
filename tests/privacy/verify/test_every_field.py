"""No field of a ledger, a plan, a manifest, a configuration or a card is passed over: a change is violated or named.

The forger makes numbers and hashes fit again, and where the ledger is changed, no card is left that says something else.
At the end stand the parts of a folder that epsilon depends on: no two of them contradict each other and are called consistent.
"""

import contextlib
import functools
import hashlib
import json
import math
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.files.public import PUBLIC_FILES
from privacy.ledger.chain import hash_line
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from tests.privacy.ledger_files import rechained
from tests.privacy.published import ASKED, PLAN, Judge, Records, publish, rewrite, sentences

Place = tuple[str | int, ...]
Forgery = Callable[[Path], object]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all stated": {"target_delta": 1e-6},
    "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
    "informal": {"noise_multiplier": 0.0},
}
IDENTIFIERS = {"nonce", "key_commitment"}
"""Random names: one is as good as another, as long as none comes twice."""
FITTED = {"seq", "previous", "type", "digest"}
"""What `rewrite` makes fit again."""
CHOICES = [
    ("poisson", "shuffle"),
    ("flat", "automatic", "grouped"),
    ("floating", "certified"),
    ("finished", "stopped", "budget_spent"),
    ("zero_out", "replace_one"),
    ("c0ffee", "decade"),
    ("random", "imported"),
    ("private", "public"),
]
"""Words of which another one of its row is a lie that still reads well."""


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of each kind of plan; the ledger of one says as much as a ledger can."""
    base, opened = (
        tmp_path_factory.mktemp("kinds"),
        {
            "max_examples_per_owner": 3,
            "unit": "one labelled image",
            "accountant": "dp-accounting 0",
            "data_hmac": "cd" * 32,
            "tuning": "none",
            "deduplication": "by bytes",
        },
    )

    @functools.cache
    def folder(name: str) -> Path:
        more = opened if name == "all stated" else {}
        return publish(
            base / name,
            make_plan(PlanRequest(**ASKED | KINDS[name])),
            steps=3 if more else 4,
            **more,
        )

    return folder


@pytest.fixture
def copied(published: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies without a card, each in place of the last one."""

    def copy(name: str) -> Path:
        shutil.rmtree(tmp_path / "forged", ignore_errors=True)
        return Path(
            shutil.copytree(
                published(name), tmp_path / "forged", ignore=shutil.ignore_patterns("report")
            )
        )

    return copy


def leaves(tree: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every number, word, truth value and null, and every list and object that is empty."""
    parts: list[tuple[str | int, Any]] = []
    if isinstance(tree, dict | list) and tree:
        parts = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    for name, inner in parts:
        yield from leaves(inner, (*place, name))
    if not parts:
        yield place, tree


def others(value: Any) -> list[Any]:
    """What a forger may put there."""
    found: list[Any] = [0.01, "0.01", [0.01], {"epsilon": 0.01}, None, "", [], {}]
    if isinstance(value, bool):
        found = [not value, None]
    elif isinstance(value, int | float):
        hair = math.nextafter(value, -math.inf) if isinstance(value, int) else value * (1 - 2e-6)
        found = [
            value + 1,
            value * 0.98 if value else -1,
            -value if value else 0.5,
            str(value),
            None,
            [],
            {},
        ]
        found += [hair] if abs(value) > 1e-7 else []
    elif isinstance(value, str):
        found = [
            value + "x",
            "",
            None,
            0.01,
            [],
            *(word for words in CHOICES if value in words for word in words),
        ]
    return [other for other in found if other != value or type(other) is not type(value)]


@contextlib.contextmanager
def changed(tree: Any, place: Place, value: Any) -> Iterator[Any]:
    """The tree with another value at a place, or for `...` without it, as long as the statement lasts."""
    inner = tree
    for part in place[:-1]:
        inner = inner[part]
    before = inner[place[-1]]
    inner[place[-1]] = value
    if value is ...:
        del inner[place[-1]]
    yield tree
    if value is ... and isinstance(inner, list):
        inner.insert(place[-1], before)
    else:
        inner[place[-1]] = before


def mutations(tree: Any, rng: random.Random, share: float) -> Iterator[tuple[Place, Any, Any]]:
    """(place, other value, tree with it), a share of all of them."""
    for place, value in list(leaves(tree)):
        for other in [*others(value), ...]:
            if rng.random() < share:
                with changed(tree, place, other):
                    copy = json.loads(json.dumps(tree))
                yield place, other, copy


FULL = [
    pytest.param(name, 1.0, marks=pytest.mark.full) for name in ("plain", "all stated", "certified")
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "share"), [("plain", 0.06), *FULL])
def test_a_change_of_a_ledger_is_violated_or_named(
    name: str, share: float, copied: Callable[[str], Path], judge: Judge
) -> None:
    """Every line's every field; a rewritten ledger is as legal as the forger can make it."""
    rng, violated, passed = random.Random(7), 0, []
    records = [
        json.loads(line) for line in (copied(name) / "ledger.jsonl").read_bytes().splitlines()
    ]
    honest = judge(copied(name))[1]["epsilon"]
    for number, record in enumerate(records):
        body = {
            field: value for field, value in record.items() if field not in (*FITTED, "time_utc")
        }
        for place, value, edited in mutations(body, rng, share):
            folder = copied(name)
            forged = {"type": record["type"], "time_utc": record["time_utc"], **edited}
            rewrite(folder, lambda all_records: all_records.__setitem__(number, forged))  # noqa: B023
            code, found = judge(folder)
            violated += code != 0
            excused = place[0] in IDENTIFIERS or (
                place[0] in verify.UNCHECKED_FIELDS and value is ...
            )
            # A cap of a row more is another legal plan. It pays less of a thousandth of delta: 3e-8 of epsilon and less here.
            excused |= (
                place == ("plan", "cap") and code == 0 and abs(found["epsilon"] / honest - 1) < 1e-6
            )
            if code == 0 and not excused and place[0] not in found["declared"]["in ledger.jsonl"]:
                passed.append(f"{record['type']} {number + 1}: {place} -> {value!r}")
    assert not passed, passed
    assert violated > (10 if share < 1 else 300)


@pytest.mark.parametrize(
    "name", ["open", "session", "intent", "done", "checkpoint", "close", "plan"]
)
def test_a_field_that_no_line_and_no_plan_has_is_violated(
    name: str, copied: Callable[[str], Path], judge: Judge
) -> None:
    def edit(records: list[dict[str, Any]]) -> None:
        line = (
            records[0]["plan"]
            if name == "plan"
            else next(one for one in records if one["type"] == name)
        )
        line["epsilon"] = 0.01

    folder = copied("plain")
    rewrite(folder, edit)
    code, found = judge(folder)
    assert (
        code == 5
        and "['epsilon']" in sentences(found)
        and "this verifier does not know" in sentences(found)
    )


def test_the_verifier_knows_the_fields_of_plans_and_no_other() -> None:
    assert set(PLAN.frozen_fields()) == verify.PLAN_FIELDS | {verify.NOISE_KIND}


def test_every_change_of_a_manifest_is_violated_or_named(
    copied: Callable[[str], Path], judge: Judge
) -> None:
    """By a forger who records the changed manifest; otherwise its hash differs from the recorded one."""
    rng, count, place_of = random.Random(1), 0, "checkpoints/step-00000004/manifest.json"
    manifest = json.loads((copied("plain") / place_of).read_text())
    free = {
        "initialisation",
        "training_data",
        "seal",
        "ledger",
    }  # words, and what `rewrite` makes fit again
    for place, value, edited in mutations(manifest, rng, 1):
        if place[0] in free or (place[0] == "charged_attempts" and value is ...):
            continue
        folder = copied("plain")
        (folder / place_of).write_text(json.dumps(edited))
        rewrite(folder, lambda records: None)
        code, found = judge(folder)
        assert code != 0, f"{place} -> {value!r}: {found}"
        count += 1
    assert count > 20


@pytest.mark.parametrize("name", ["plain", "all stated"])
def test_every_change_of_the_configuration_s_plan_is_violated(
    name: str, copied: Callable[[str], Path], judge: Judge
) -> None:
    folder, rng, count = copied(name), random.Random(2), 0
    tree = tomllib.loads((folder / "config.toml").read_text())

    def written(tree: dict[str, Any]) -> None:
        """As TOML; what it cannot hold is left out."""
        lines = []
        for section, table in tree.items():
            lines += [f"[{section}]"]
            lines += [
                f"{key} = {json.dumps(value)}"
                for key, value in table.items()
                if value not in (None, {})
            ]
        (folder / "config.toml").write_text("\n".join(lines))

    written(tree)
    assert judge(folder)[0] == 0
    for place, value, edited in mutations(tree, rng, 0.3):
        if place == ("data", "provenance") or value in (..., None, {}):
            continue  # words; and what is not asked for has its default
        written(edited)
        code, found = judge(folder)
        assert code == 5, f"{place} -> {value!r}: {found}"
        count += 1
    assert count > 10


@pytest.mark.parametrize(
    "name", ["plain", "informal", pytest.param("all stated", marks=pytest.mark.full)]
)
def test_every_change_of_a_card_s_claim_plan_and_counts_is_violated(
    name: str, published: Callable[[str], Path], judge: Judge
) -> None:
    code, found = judge(published(name))
    assert code == 0, sentences(found) + sentences(found, "inconclusive")
    read = verify.Folder(
        published(name), verify.read_ledger(published(name) / "ledger.jsonl"), parents=[]
    )
    verify.check_epsilon(read)
    card, expected = (
        json.loads((read.path / "report/privacy_card.json").read_text()),
        verify.card_fields(read),
    )
    for where, right in expected.items():
        place = tuple(where.split("."))
        for other in [*others(verify.value_at(card, where)), ...]:
            with changed(card, place, other) as forged:
                wrong = verify.compare("", verify.value_at(forged, where), right, where)
            larger = (
                isinstance(right, verify.Bound) and type(other) in (int, float) and other > right
            )
            assert wrong or larger, f"{where}: {right!r} -> {other!r} passes"
    claim = {
        "epsilon",
        "delta",
        "formal_guarantee",
        "reasons",
        "steps_done",
        "attempts_charged",
        "accounting.epsilon",
    }
    mechanism = {f"plan.{field}" for field in PLAN.frozen_fields()} - {"plan.target_epsilon"}
    assert claim | mechanism | {"opened.key_commitment", "ledger.lines"} <= expected.keys()


def test_a_card_of_version_0_1_is_compared_at_its_own_places(
    published: Callable[[str], Path], judge: Judge, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(published("plain"), tmp_path / "run"))
    path = folder / "report/privacy_card.json"
    card = json.loads(path.read_text())
    ledger, opened = card.pop("ledger"), card.pop("opened")
    card |= {
        "card_format": 3,
        "adjacency": "zero_out",
        "unit_of_privacy": {"num_examples": card["plan"]["num_examples"]},
        "sampling": {"key_commitment_sha256": opened["key_commitment"]},
        "provenance": {"ledger": ledger},
    }
    path.write_text(json.dumps(card))
    code, found = judge(folder)
    assert code == 0, sentences(found) + sentences(found, "inconclusive")
    for where in (*verify.PLACES_OF_FORMAT_3, "plan.noise_multiplier", "epsilon"):
        with changed(card, tuple(where.split(".")), 0) as forged:
            path.write_text(json.dumps(forged))
        code, found = judge(folder)
        assert code == 5 and f"the card's {where} is 0" in sentences(found), where


# The parts of a folder that epsilon depends on are the plan, charges and `behind` of ledger.jsonl. What else states one of them:
#   config.toml          the plan's numbers, and the private runs behind the weights ([init])
#   behind/*.jsonl       plans and charges of these runs, and the runs behind each of them
#   manifests            charges, a line of the ledger, and, of the trainer, runs behind the weights with their epsilons
#   privacy_card.json    claim, plan, charges, and what the claim is composed of
#   metrics.jsonl, head.json   claims, which the tests above and test_forgeries.py change
# Below, one of them is changed by the least, and the ledger is chained again.

FIRST = "behind/ledger-1.jsonl"
CANNOT_MATTER = {
    "ds_config.json": "the machine's settings: the trainer takes no number of the plan from it",
    "environment.json": "versions of programs; the verifier uses its own accountant",
    "report/privacy_card.html": "no page is read, and the verdict's line says so",
    "report/privacy_card.md": "no page is read, and the verdict's line says so",
    "report/audit.json": "an audit is of the ledger as it was on that day",
    "evaluation/linear-probe-step-00000004-0123abcd.json": "may be of another model, or of the run before its end",
    "evaluation/metrics.jsonl": "results of evaluations, without an epsilon",
    "tensorboard/events.out.tfevents.0000000001": "what metrics.jsonl states, in a format for another program",
}
"""Public files that no check compares, each with the reason. What they state is not believed: it is declared as unread."""


@pytest.fixture(scope="session")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs on the weights of others: `loop` on those of `left` and `right`, which started from `first`, and `trainer`."""
    base = tmp_path_factory.mktemp("chains")
    kinds: dict[str, dict[str, Any]] = {
        "first": {},
        "left": {"behind": ["first"]},
        "right": {"behind": ["first"]},
        "loop": {"behind": ["left", "right"]},
        "second": {"behind": ["first"], "by_trainer": True},
        "trainer": {"behind": ["second"], "by_trainer": True},
    }

    @functools.cache
    def folder(name: str) -> Path:
        more = kinds[name] | {"behind": [folder(run) for run in kinds[name].get("behind", ())]}
        key = hashlib.sha256(name.encode()).hexdigest()
        return publish(base / name, **more, with_card=name == "loop", key_commitment=key)

    return folder


@pytest.fixture
def forged(chains: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Forgery], Path]:
    """A copy without a card, in which something was changed and the ledger was chained again."""

    def forge(name: str, edit: Forgery) -> Path:
        folder = Path(
            shutil.copytree(
                chains(name), tmp_path / "forged", ignore=shutil.ignore_patterns("report")
            )
        )
        edit(folder)
        rewrite(folder, lambda records: None)
        return folder

    return forge


def behind_is(*kept: int, **changes: Any) -> Forgery:
    """The ledger names these of the runs behind it and no other, with changes in the first of them; other copies are gone."""

    def edit(folder: Path) -> None:
        def drop(records: Records) -> None:
            named = records[0].pop("behind")
            for place in named:
                if named.index(place) not in kept:
                    (folder / place["file"]).unlink()
            if kept:
                records[0]["behind"] = [named[number] for number in kept]
                records[0]["behind"][0] |= changes

        rewrite(folder, drop)

    return edit


def config_says(before: str, after: str) -> Forgery:
    def edit(folder: Path) -> None:
        text = (folder / "config.toml").read_text()
        assert text.count(before) == 1
        (folder / "config.toml").write_text(text.replace(before, after))

    return edit


def manifest_says(change: Callable[[dict[str, Any]], object]) -> Forgery:
    def edit(folder: Path) -> None:
        (path,) = folder.glob("checkpoints/step-*/manifest.json")
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return edit


def both(*edits: Forgery) -> Forgery:
    return lambda folder: [edit(folder) for edit in edits] and None


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def cut_the_oldest(folder: Path) -> None:
    """The ledger of the oldest run behind is cut after its first charge, and every ledger names it so."""
    oldest = max(folder.glob("behind/*.jsonl"))
    lines = oldest.read_bytes().splitlines(keepends=True)[:4]
    oldest.write_bytes(b"".join(lines))
    place = {"lines": len(lines), "hash": hash_line(lines[-1].removesuffix(b"\n"))}
    records = [json.loads(line) for line in (folder / FIRST).read_bytes().splitlines()]
    records[0]["behind"][-1] |= place
    (folder / FIRST).write_bytes(rechained(records))
    newer = {
        "lines": len(records),
        "hash": hash_line((folder / FIRST).read_bytes().splitlines()[-1]),
    }
    rewrite(
        folder, lambda own: [own[0]["behind"][-1].update(place), own[0]["behind"][0].update(newer)]
    )


def disjoint_of_what_it_does_not_name(folder: Path) -> None:
    """`left` declares data disjoint from those of `first`, and stands before `right`, with which it may share examples."""
    records = [json.loads(line) for line in (folder / FIRST).read_bytes().splitlines()]
    records[0]["disjoint_from_start"] = True
    (folder / FIRST).write_bytes(rechained(records))
    last = hash_line((folder / FIRST).read_bytes().splitlines()[-1])
    rewrite(folder, lambda own: own[0]["behind"][0].update(hash=last))


NAMES, LACKS = 'starts_from = ["left", "right"]', "and `behind` of the ledger does not"
START = "initialisation"
UNPROVEN = {
    "kind": "checkpoint",
    "run": "second",
    "step": 4,
    "training_data": "private",
    "guarantee": None,
}
CONTRADICTIONS: dict[str, tuple[str, Forgery, int, str]] = {
    # Runs behind: the ledger, behind/ and config.toml of a loop
    "honest loop": ("loop", lambda folder: None, 0, ""),
    "all runs dropped": ("loop", behind_is(), 5, f"config.toml starts from left, right, {LACKS}"),
    "one of two dropped": ("loop", behind_is(0, 2), 5, f"config.toml starts from right, {LACKS}"),
    "the newer ones dropped": (
        "loop",
        behind_is(2),
        5,
        f"config.toml starts from left, right, {LACKS}",
    ),
    "the oldest dropped": (
        "loop",
        behind_is(0, 1),
        5,
        "names other ledgers behind it than there are",
    ),
    "one renamed": (
        "loop",
        behind_is(0, 1, 2, run="public"),
        5,
        f"config.toml starts from left, {LACKS}",
    ),
    "one listed twice": (
        "loop",
        behind_is(0, 0, 1, 2),
        5,
        "is of a run that the chain has already",
    ),
    "disjoint from more than it names": (
        "loop",
        disjoint_of_what_it_does_not_name,
        5,
        "declares data disjoint from those",
    ),
    "one more asked for": (
        "loop",
        config_says('"left"', '"left", "third"'),
        5,
        f"config.toml starts from third, {LACKS}",
    ),
    "one asked for twice": (
        "loop",
        config_says('"left"', '"left", "left"'),
        5,
        f"config.toml starts from left, {LACKS}",
    ),
    "another asked for": (
        "loop",
        config_says('"left"', '"Left"'),
        5,
        f"config.toml starts from Left, {LACKS}",
    ),
    "one asked for, as a word": (
        "loop",
        config_says(NAMES, 'starts_from = "left"'),
        5,
        "starts from right, and config.toml",
    ),
    "a common start asked for, too": ("loop", config_says('"right"', '"right", "first"'), 0, ""),
    "asked for public weights": (
        "loop",
        config_says(NAMES, 'starts_from = "public"'),
        5,
        "starts from left, and config.toml",
    ),
    "a private run named public": (
        "loop",
        config_says(NAMES, 'starts_from = ["public"]'),
        5,
        f"starts from public, {LACKS}",
    ),
    "asked for nothing": (
        "loop",
        config_says(NAMES, "starts_from = []"),
        5,
        'neither "public" nor names of runs',
    ),
    "asked for lists": (
        "loop",
        config_says('"left"', '["left"]'),
        5,
        'neither "public" nor names of runs',
    ),
    "asked for a number": (
        "loop",
        config_says(NAMES, "starts_from = 2"),
        5,
        'neither "public" nor names of runs',
    ),
    "silent, as of a resume by 0.1.0": ("loop", config_says(NAMES, ""), 0, ""),
    "no config.toml, and runs dropped": (
        "loop",
        both(behind_is(), lambda folder: (folder / "config.toml").unlink()),
        6,
        "config.toml is missing",
    ),
    "broken config.toml, and runs dropped": (
        "loop",
        both(behind_is(), config_says("[init]", "[init")),
        2,
        "is not TOML",
    ),
    # The same of the trainer, whose manifests say it as well
    "honest trainer": ("trainer", lambda folder: None, 0, ""),
    "trainer: all dropped": (
        "trainer",
        behind_is(),
        5,
        "says private runs second, first made its weights, the ledger none",
    ),
    "trainer: the oldest dropped": (
        "trainer",
        behind_is(0),
        5,
        "names other ledgers behind it than there are",
    ),
    "trainer: the newer dropped": (
        "trainer",
        behind_is(1),
        5,
        "says private runs second, first made its weights, the ledger f",
    ),
    "trainer: one renamed": ("trainer", behind_is(0, 1, run="third"), 5, "the ledger third, first"),
    "trainer: from random weights": (
        "trainer",
        both(behind_is(), manifest_says(lambda one: one.update(initialisation={"kind": "random"}))),
        5,
        "config.toml starts from init.checkpoint, and step-00000004 says random",
    ),
    "trainer: a start of no words": (
        "trainer",
        both(behind_is(), manifest_says(lambda one: one.pop(START))),
        5,
        "does not say what its weights started from",
    ),
    "trainer: a start without a guarantee": (
        "trainer",
        both(behind_is(), manifest_says(lambda one: one.update(initialisation=UNPROVEN))),
        5,
        "started from private data of second without a guarantee",
    ),
    "trainer: a checkpoint is asked for, and no words": (
        "first",
        both(
            config_says("[data]", '[init]\ncheckpoint = "one"\n[data]'),
            manifest_says(lambda one: one.pop(START)),
        ),
        5,
        "does not say what its weights started from",
    ),
    "trainer: another run": (
        "trainer",
        manifest_says(lambda one: one[START].update(run="third")),
        5,
        "says private runs third, first made",
    ),
    "trainer: one start less": (
        "trainer",
        manifest_says(lambda one: one[START].pop("before_that")),
        5,
        "says private runs second made its weights",
    ),
    "trainer: another delta": (
        "trainer",
        manifest_says(lambda one: one[START]["guarantee"].update(delta=1e-6)),
        5,
        "states of second epsilon",
    ),
    "trainer: no manifests, and all dropped": (
        "trainer",
        both(behind_is(), without_checkpoints),
        6,
        "no manifest says whether a private run made that",
    ),
    "trainer: no manifests": ("trainer", without_checkpoints, 0, ""),
    "trainer: a ledger behind is cut": ("trainer", cut_the_oldest, 5, "states of first epsilon"),
    # Numbers of the plan, in config.toml
    "sigma": (
        "first",
        config_says("noise_multiplier = 4.0", "noise_multiplier = 4.1"),
        5,
        "asks for noise_multiplier = 4.1",
    ),
    "C": (
        "first",
        config_says("max_grad_norm = 1.0", "max_grad_norm = 1.001"),
        5,
        "asks for max_grad_norm = 1.001",
    ),
    "n": (
        "first",
        config_says("num_examples = 2000", "num_examples = 1999"),
        5,
        "asks for data.num_examples = 1999",
    ),
    "B": (
        "first",
        config_says("expected_batch_size = 100", "expected_batch_size = 101"),
        5,
        "asks for expected_batch_size",
    ),
    "steps": (
        "first",
        config_says("num_steps = 4", "num_steps = 5"),
        5,
        "asks for train.num_steps = 5",
    ),
    "delta": (
        "first",
        config_says("target_delta = 1e-05", "target_delta = 1.1e-05"),
        5,
        "asks for target_delta = 1.1e-05",
    ),
    "no sigma": (
        "first",
        config_says("noise_multiplier = 4.0", ""),
        5,
        "states neither noise nor epsilon",
    ),
    "no n": (
        "first",
        config_says("num_examples = 2000", ""),
        5,
        "asks for data.num_examples = None",
    ),
    "no B": (
        "first",
        config_says("expected_batch_size = 100", ""),
        5,
        "asks for expected_batch_size = None",
    ),
    "no steps": ("first", config_says("num_steps = 4", ""), 5, "asks for train.num_steps = None"),
    "no delta": (
        "first",
        config_says("target_delta = 1e-05", ""),
        5,
        "asks for target_delta = 0.00025",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_no_two_parts_of_a_folder_contradict_each_other_in_silence(
    name: str, forged: Callable[[str, Forgery], Path], judge: Judge
) -> None:
    kind, edit, code, said = CONTRADICTIONS[name]
    got, found = judge(forged(kind, edit))
    words = found["error"] if code == 2 else sentences(found) + sentences(found, "inconclusive")
    assert got == code and said in words, words


@pytest.mark.parametrize("earlier", range(3, 11))
def test_a_manifest_remembers_a_line_of_its_own_step(
    earlier: int, chains: Callable[[str], Path], tmp_path: Path, judge: Judge
) -> None:
    """With the charges up to that line, and recorded as it is: fewer charges than its step had taken."""
    folder = Path(shutil.copytree(chains("first"), tmp_path / "forged"))
    lines = (folder / "ledger.jsonl").read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    charged = [record["type"] for record in records[: earlier + 1]].count("intent")

    def remember(manifest: dict[str, Any]) -> None:
        manifest |= {
            "ledger": {"seq": earlier, "hash": hash_line(lines[earlier])},
            "charged_attempts": charged,
        }

    manifest_says(remember)(folder)
    (path,) = folder.glob("checkpoints/step-*/manifest.json")
    (recorded,) = (record for record in records if record["type"] == "checkpoint")
    recorded["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "ledger.jsonl").write_bytes(rechained(records))
    code, found = judge(folder)
    assert code == 5 and f"remembers line {earlier + 1}, which is of another step" in sentences(
        found
    )


COMPOSED = {
    "epsilon": -1e-6,
    "delta": 2e-5,
    "runs.0.attempts_charged": 4,
    "runs.1.name": "public",
    "runs.1.epsilon": 0.05,
    "runs.2.delta": 1e-4,
    "runs.2.file": "ledger.jsonl",
    "runs.3.attempts_charged": 1,
    "runs.1.disjoint_from_those_before": True,
    "runs.4": {"name": "fourth"},
    "runs.3": ...,
    "runs": [],
    "": None,
}
"""Changes of what a card says that its claim is composed of; a negative number is added."""


def test_a_card_s_claim_is_composed_of_the_runs_of_the_ledger(
    chains: Callable[[str], Path],
) -> None:
    folder = chains("loop")
    read = verify.Folder(folder, verify.read_ledger(folder / "ledger.jsonl"))
    verify.check_behind(read)
    verify.check_epsilon(read)
    card = json.loads((folder / "report/privacy_card.json").read_text())
    expected = verify.card_fields(read)

    def wrong(card: dict[str, Any]) -> list[str]:
        stated = {
            place: verify.compare("", verify.value_at(card, place), value, place)
            for place, value in expected.items()
        }
        return [said for said in stated.values() if said]

    assert not wrong(card)
    for where, value in COMPOSED.items():
        forged = json.loads(json.dumps(card))
        *parts, last = ["composition", *filter(None, where.split("."))]
        inner = functools.reduce(
            lambda tree, part: tree[int(part) if isinstance(tree, list) else part], parts, forged
        )
        key = int(last) if isinstance(inner, list) else last
        if value is ...:
            del inner[key]
        elif isinstance(inner, list) and key == len(inner):
            inner.append(value)
        else:
            inner[key] = inner[key] + value if type(value) is float and value < 0 else value
        assert wrong(forged), f"{where} -> {value!r} passes"


def test_a_composition_without_runs_behind_is_violated(
    forged: Callable[[str, Forgery], Path], chains: Any, judge: Judge
) -> None:
    """The ledger lost them, config.toml too, and the card speaks of them still; its larger epsilon is no contradiction."""
    folder = forged("loop", both(behind_is(), config_says(NAMES, 'starts_from = "public"')))
    shutil.copytree(chains("loop") / "report", folder / "report")
    rewrite(folder, lambda records: None)
    code, found = judge(folder)
    assert code == 5 and "the card's composition is" in sentences(found)


def test_a_private_head_has_no_configuration(judge: Judge, tmp_path: Path) -> None:
    """It would say what was asked for, and be compared with nothing."""
    folder = publish(tmp_path / "run", with_card=False)
    (folder / "config.toml").rename(folder / "config")
    text = verify.read_ledger(folder / "ledger.jsonl")
    text.opened["head"] = {"method": "dp-ls"}
    assert "no config.toml" in verify.check_plan(verify.Folder(folder, text))
    (folder / "config").rename(folder / "config.toml")
    with pytest.raises(verify.Violated, match="one is here"):
        verify.check_plan(verify.Folder(folder, text))


def test_other_public_files_cannot_matter_and_are_declared_as_unread(
    chains: Callable[[str], Path], tmp_path: Path, judge: Judge
) -> None:
    """Whatever epsilon they state, the verdict and its line are the same."""
    folder = Path(shutil.copytree(chains("first"), tmp_path / "copy"))
    before = judge(folder)
    for name in CANNOT_MATTER:
        assert PUBLIC_FILES.fullmatch(name), name
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(
            '{"privacy/epsilon": 0.01, "model": {"epsilon": 0.01}, "noise_multiplier": 400}'
        )
    assert judge(folder) == before and before[0] == 0
    unread = "not read, and neither is an epsilon that they state"
    assert before[1]["declared"]["tensorboard/, private/ and all other files"] == unread
    assert "no page was read" in before[1]["line"]
