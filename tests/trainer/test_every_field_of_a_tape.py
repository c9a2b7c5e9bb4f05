"""No field of an audit's tape is passed over: the least change of each is violated, or it cannot matter.

An honest sandbox on two ranks is recorded once. Then one thing that it noted is changed by the least, and all is judged again:
what a rank noted of an attempt, what it saw of fsyncs, the ledger's lines, and what all ranks were given.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from privacy.audit.audit_report import AuditReport
from tests.distributed.ranks import run_ranks
from tests.trainer.sandboxes import Evidence, require_consistent
from trainer.audit.judge import Judge
from trainer.audit.sandbox import Fsync

HAIR = 1e-8
"""The audit allows a relative 1e-9 in the deviation of noise, for the rounding of its own computation."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditReport, Evidence]:
    folder = tmp_path_factory.mktemp("ranks")
    recorded: tuple[AuditReport, Evidence] = run_ranks(
        "tests.trainer.sandboxes:recorded", 2, timeout=280, folder=folder
    )[0]
    return recorded


@pytest.fixture
def honest(two_ranks: tuple[AuditReport, Evidence]) -> Evidence:
    return two_ranks[1]


def test_a_correct_mechanism_passes_on_two_ranks(two_ranks: tuple[AuditReport, Evidence]) -> None:
    require_consistent(two_ranks[0])


# What a rank noted of an attempt

Noted = dict[str, Any]


class Place(NamedTuple):
    """Where a note stands.

    Attributes:
        is_followed: the next step began with the weights that this attempt left.
        charged_at: when the fsync of the attempt's intent had returned.
        step: h of sums and noise.
        coordinates: of this rank, one without a gradient ("quiet"), one of the crowd, one of a canary that is in the batch
            ("present") and one that is not ("absent"), as far as it owns such.
    """

    attempt: int
    rank: int
    is_silent: bool
    is_followed: bool
    charged_at: int
    step: float
    batch_size: int
    coordinates: dict[str, int]


class Change(NamedTuple):
    """The least change of a field: `edit` writes it into a note, at one of the coordinates if the field has such."""

    field: str
    what: str
    edit: Callable[[Noted, Place, int], object]
    at: str = ""


def put(name: str, value: Callable[[Any, Place], Any]) -> Callable[[Noted, Place, int], None]:
    """Changes one number of an array."""

    def edit(noted: Noted, place: Place, index: int) -> None:
        noted[name] = noted[name].copy()
        noted[name][index] = value(noted[name][index], place)

    return edit


def up(value: Any, place: Place) -> Any:
    return np.nextafter(value, np.inf)


def one_more(value: Any, place: Place) -> Any:
    return value + 1


def one_step_more(value: Any, place: Place) -> Any:
    return (np.rint(value * place.batch_size / place.step) + 1) * place.step / place.batch_size


def rows(*kept: int | slice) -> Callable[[Noted, Place, int], None]:
    """Some of the members, in another order, each with its key."""

    def edit(noted: Noted, place: Place, index: int) -> None:
        order = np.concatenate([np.arange(len(noted["ids"]))[row].reshape(-1) for row in kept])
        noted |= {name: noted[name][order] for name in ("ids", "keys")}

    return edit


def another_member(noted: Noted, place: Place, index: int) -> None:
    other = next(number for number in range(len(noted["ids"]) + 1) if number not in noted["ids"])
    noted["ids"] = np.array([other, *noted["ids"][1:]])


def six_roundings_more(noted: Noted, place: Place, index: int) -> None:
    """In single precision, of the larger of the weights before and after the step."""
    size = max(abs(noted["before"][index]), abs(noted["after"][index]))
    put("after", lambda weight, place: weight + size * 6 * 2.0**-23 + 2.0**-149)(
        noted, place, index
    )


def a_hair_less(noted: Noted, place: Place, index: int) -> None:
    noted["deviations"] = [*noted["deviations"][:-1], noted["deviations"][-1] * (1 - HAIR)]


def with_the_charge(noted: Noted, place: Place, index: int) -> None:
    noted["released_at"] = place.charged_at


CHANGES = [
    Change("step", "the next", lambda noted, *_: noted.update(step=noted["step"] + 1)),
    Change(
        "session", "another", lambda noted, *_: noted.update(session=(noted["session"] + 1) % 3)
    ),
    Change("silent", "the other", lambda noted, *_: noted.update(silent=not noted["silent"])),
    Change("before", "the least", put("before", up), "quiet"),
    Change("after", "the least", put("after", up), "quiet"),
    Change("after", "six roundings", six_roundings_more, "quiet"),
    Change("after", "six roundings", six_roundings_more, "present"),
    Change("draws", "a unit", put("draws", one_more), "quiet"),
    Change("draws", "a unit", put("draws", one_more), "crowd"),
    Change("draws", "a unit", put("draws", one_more), "absent"),
    Change("draws", "a unit", put("draws", one_more), "present"),
    Change(
        "num_draws", "one more", lambda noted, *_: noted.update(num_draws=noted["num_draws"] + 1)
    ),
    Change(
        "num_draws", "one less", lambda noted, *_: noted.update(num_draws=noted["num_draws"] - 1)
    ),
    Change("deviations", "a hair less", a_hair_less),
    Change("handed", "the least", put("handed", up), "quiet"),
    Change("handed", "the least", put("handed", up), "present"),
    Change("handed", "a step", put("handed", one_step_more), "quiet"),
    Change("handed", "a step", put("handed", one_step_more), "crowd"),
    Change("handed", "a step", put("handed", one_step_more), "absent"),
    Change("handed", "a step", put("handed", one_step_more), "present"),
    Change("ids", "two exchanged", rows(1, 0, slice(2, None))),
    Change("ids", "one less", rows(slice(0, -1))),
    Change("ids", "one twice", rows(0, slice(None))),
    Change("ids", "another", another_member),
    Change("keys", "a bit", put("keys", lambda key, place: key ^ np.uint64(1)), "first"),
    Change("released_at", "with the charge", with_the_charge),
    Change(
        "released_at", "later", lambda noted, *_: noted.update(released_at=noted["released_at"] + 1)
    ),
    Change("least_entropy", "15 bytes", lambda noted, *_: noted.update(least_entropy=15)),
    Change("least_entropy", "16 bytes", lambda noted, *_: noted.update(least_entropy=16)),
]

OF_RANK_0 = "the sandbox says it, and rank 0 stands for all; what another rank did shows in its members, numbers and sums"
BY_ROUNDING = (
    "what clipping leaves of a canary is known to a hundredth, and single weights hide a step"
)


def cannot_matter(change: Change, place: Place) -> str:
    """The reason, or "" where the change has to be violated."""
    match change:
        case Change("step" | "session" | "silent") if place.rank > 0:
            return OF_RANK_0
        case Change("after", "the least") if not place.is_followed:
            return "single weights hide it by rounding, and no step begins with it"
        case Change("draws") if place.is_silent:
            return "the weights get a zero in its place"
        case Change("draws" | "handed", at="present") if change.what != "the least":
            return BY_ROUNDING
        case Change("released_at", "later"):
            return "what leaves the process behind the charge is late enough"
        case Change("least_entropy", "16 bytes"):
            return "they are enough"
    return ""


def places(evidence: Evidence, attempts: range | tuple[int, ...]) -> Iterator[Place]:
    judge, steps = evidence.judge(), [note["step"] for note in evidence.tapes[0][0]]
    honest_N = ~judge.canaries.hostile_N
    for attempt in attempts:
        first = 0
        for rank, (notes, _) in enumerate(evidence.tapes):
            owner_D = judge.owner_D[first : first + len(notes[attempt]["after"])]
            first += len(owner_D)
            is_member_D = judge.included_AN[attempt][owner_D]
            kinds = {
                "quiet": owner_D == -1,
                "crowd": owner_D == -2,
                "present": (owner_D >= 0) & is_member_D & honest_N[owner_D],
                "absent": (owner_D >= 0) & ~is_member_D,
                "first": np.ones(1),
            }
            yield Place(
                attempt=attempt,
                rank=rank,
                is_silent=notes[attempt]["silent"],
                is_followed=steps[attempt] + 1 in steps[attempt + 1 : attempt + 2],
                charged_at=fsync_of_charge(evidence, attempt).returned_at,
                step=judge.step,
                batch_size=judge.plan.expected_batch_size,
                coordinates={
                    kind: int(np.flatnonzero(is_one)[0])
                    for kind, is_one in kinds.items()
                    if is_one.any()
                },
            )


@pytest.mark.parametrize("attempts", [(2, 7), pytest.param(range(9), marks=pytest.mark.full)])
def test_a_change_of_a_note_is_violated_or_cannot_matter(
    honest: Evidence, attempts: range | tuple[int, ...]
) -> None:
    """By day in two attempts: the retry, without noise, and one with noise."""
    require_consistent(honest.judge().report())
    wrong, tried = [], set()
    for place in places(honest, attempts):
        for change in CHANGES:
            index = place.coordinates.get(change.at, 0)
            if change.at and change.at not in place.coordinates:
                continue
            tapes = [(list(notes), fsyncs) for notes, fsyncs in honest.tapes]
            note = dict(tapes[place.rank][0][place.attempt])
            change.edit(note, place, index)
            tapes[place.rank][0][place.attempt] = note
            report, reason = (
                honest._replace(tapes=tapes).judge().report(),
                cannot_matter(change, place),
            )
            tried.add(change)
            if (report.verdict == "violated") is bool(reason):
                wrong.append(
                    (
                        change.field,
                        change.what,
                        change.at,
                        place.attempt,
                        place.rank,
                        reason or "is not found",
                    )
                )
    assert not wrong, "\n".join(map(str, wrong))
    assert tried == set(CHANGES)


def test_every_field_of_a_note_is_changed(honest: Evidence) -> None:
    noted = {field for notes, _ in honest.tapes for note in notes for field in note}
    assert noted == {change.field for change in CHANGES}


# What a rank saw of fsyncs


def fsyncs_of(evidence: Evidence, path: Path) -> list[Fsync]:
    status = path.stat()
    return [
        fsync for fsync in evidence.tapes[0][1] if fsync.place == (status.st_dev, status.st_ino)
    ]


def released_at(evidence: Evidence, attempt: int) -> int:
    return min(notes[attempt]["released_at"] for notes, _ in evidence.tapes)


def fsync_of_charge(evidence: Evidence, attempt: int) -> Fsync:
    """The last one of the ledger before the release: the intent is the last line then."""
    of_ledger = fsyncs_of(evidence, evidence.run.folder.ledger)
    return max(
        (fsync for fsync in of_ledger if fsync.returned_at < released_at(evidence, attempt)),
        key=lambda fsync: fsync.returned_at,
    )


def test_every_field_of_an_fsync_is_violated_or_cannot_matter(honest: Evidence) -> None:
    ledger = honest.run.folder.ledger
    first = released_at(honest, 0)
    of_folder = [
        fsync
        for fsync in fsyncs_of(honest, ledger.parent)
        if fsync.returned_at < first and ledger.name in fsync.inodes
    ]
    of_charges = [fsync_of_charge(honest, attempt) for attempt in range(9)]
    released = {id(fsync): released_at(honest, attempt) for attempt, fsync in enumerate(of_charges)}
    changes: dict[str, Callable[[Fsync], Any]] = {
        "place": lambda fsync: (fsync.place[0], fsync.place[1] + 1),
        "returned_at": lambda fsync: released.get(id(fsync), first),
        "size": lambda fsync: fsync.size - 1,
        "inodes": lambda fsync: fsync.inodes | {ledger.name: fsync.inodes.get(ledger.name, 0) + 1},
    }
    assert set(changes) == set(Fsync._fields) and of_folder
    cannot_matter = {
        ("size", "folder"): "some file systems count names in it, others blocks",
        ("inodes", "file"): "a file has no names in it",
    }
    for field, value in changes.items():
        for kind, many in [
            ("folder", of_folder),
            *(("file", [of_charges[attempt]]) for attempt in (0, 2, 8)),
        ]:
            fsyncs = [
                fsync._replace(**{field: value(fsync)}) if fsync in many else fsync
                for fsync in honest.tapes[0][1]
            ]
            report = (
                honest._replace(tapes=[(honest.tapes[0][0], fsyncs), *honest.tapes[1:]])
                .judge()
                .report()
            )
            expected = {"file": "charge_before_release", "folder": "ledger_name_durable"}[kind]
            assert report.failed() == ([] if (field, kind) in cannot_matter else [expected]), (
                field,
                kind,
            )


# The ledger's lines, and what all ranks were given

Lines = list[dict[str, Any]]


def of_type(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["type"] == kind]


def scaled(name: str) -> Callable[[Lines], object]:
    def edit(lines: Lines) -> None:
        of_type(lines, "intent")[-1]["releases"][0][name] *= 1 - HAIR

    return edit


LINES: dict[str, tuple[Callable[[Lines], object], str]] = {
    "intent.step": (lambda lines: of_type(lines, "intent")[-1].update(step=99), "charged_attempts"),
    "intent.attempt": (
        lambda lines: of_type(lines, "intent")[-1].update(attempt=1),
        "charged_attempts",
    ),
    "intent.attempt of the retry": (
        lambda lines: of_type(lines, "intent")[2].update(attempt=0),
        "charged_attempts",
    ),
    "intent.releases: std": (scaled("std"), "charged_attempts"),
    "intent.releases: sensitivity": (scaled("sensitivity"), "charged_attempts"),
    "intent.releases: another one": (
        lambda lines: of_type(lines, "intent")[-1]["releases"].append({}),
        "charged_attempts",
    ),
    "an intent twice": (
        lambda lines: lines.append(of_type(lines, "intent")[-1]),
        "charged_attempts",
    ),
    "no intent": (lambda lines: lines.remove(of_type(lines, "intent")[2]), "charged_attempts"),
    "session.nonce": (
        lambda lines: of_type(lines, "session")[1].update(nonce="00" * 16),
        "dealt_members",
    ),
    "session.nonce of the start before": (
        lambda lines: of_type(lines, "session")[1].update(
            nonce=of_type(lines, "session")[0]["nonce"]
        ),
        "nonces_are_new",
    ),
}
UNREAD = {"seq", "type", "time_utc", "previous", "environment", "mirror"}
"""Chain and words, which verify.py reads (tests/privacy/verify/test_every_field.py)."""


@pytest.mark.parametrize("what", LINES)
def test_a_change_of_a_line_is_violated(honest: Evidence, what: str) -> None:
    edit, expected = LINES[what]
    judge = honest.judge()
    lines = [json.loads(line) for line in judge.records.splitlines()]
    edit(lines)
    judge.records = b"".join(
        json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines
    )
    assert expected in judge.report().failed()


def test_every_field_of_a_line_is_changed(honest: Evidence) -> None:
    lines = [json.loads(line) for line in honest.judge().records.splitlines()]
    fields = {
        f"{kind}.{field}"
        for kind in ("session", "intent")
        for line in of_type(lines, kind)
        for field in line
    }
    changed = {what.split(":")[0].split()[0] for what in LINES if "." in what}
    assert {field for field in fields if field.split(".")[1] not in UNREAD} == changed


def plan_with(evidence: Evidence, **fields: float) -> Evidence:
    audited = evidence.audited
    scaled = {name: getattr(audited, name) * factor for name, factor in fields.items()}
    return evidence._replace(audited=dataclasses.replace(audited, **scaled))


def opened_with(evidence: Evidence, more: int) -> Evidence:
    opened = evidence.run.ledger.opened
    ledger = SimpleNamespace(opened=opened | {"sum_exponent": opened["sum_exponent"] + more})
    return evidence._replace(run=SimpleNamespace(**vars(evidence.run) | {"ledger": ledger}))


def half_the_rows(evidence: Evidence, session: int) -> Evidence:
    sizes = [
        size // 2 if number == session else size
        for number, size in enumerate(evidence.micro_batches)
    ]
    return evidence._replace(micro_batches=tuple(sizes))


def presence_with(evidence: Evidence, kind: str) -> Evidence:
    """A member of some attempt that is in the data is said not to be, or the other way round."""
    canaries, members = (
        evidence.canaries,
        np.unique(np.concatenate([note["ids"] for note in evidence.tapes[0][0]])),
    )
    of_kind_N = {
        "honest": ~canaries.crowd_N & ~canaries.hostile_N & evidence.present_N,
        "crowd": canaries.crowd_N,
        "absent": ~canaries.hostile_N & ~evidence.present_N,
    }[kind]
    member = next(member for member in members if of_kind_N[member])
    return evidence._replace(present_N=evidence.present_N ^ (np.arange(len(canaries)) == member))


GIVEN: dict[str, Callable[[Evidence], Evidence]] = {
    "audited: sigma": lambda evidence: plan_with(evidence, noise_multiplier=1 - HAIR),
    "audited: C": lambda evidence: plan_with(evidence, max_grad_norm=1 + HAIR),
    "run: half the step h": lambda evidence: opened_with(evidence, 1),
    "run: twice the step h": lambda evidence: opened_with(evidence, -1),
    **{
        f"micro_batches: {session}": partial(half_the_rows, session=session) for session in range(3)
    },
    **{
        f"present_N: {kind}": partial(presence_with, kind=kind)
        for kind in ("honest", "crowd", "absent")
    },
}
CHANGED_ABOVE = {"tapes"}
MADE_UP = {"canaries"}
"""By the audit itself: nothing of the mechanism is in them."""


@pytest.mark.parametrize("what", GIVEN)
def test_a_change_of_what_is_given_is_violated(honest: Evidence, what: str) -> None:
    assert GIVEN[what](honest).judge().report().verdict == "violated"


def test_every_parameter_of_the_judge_is_changed() -> None:
    changed = {what.split(":")[0] for what in GIVEN}
    assert (
        set(inspect.signature(Judge).parameters)
        == set(Evidence._fields)
        == changed | CHANGED_ABOVE | MADE_UP
    )


# Mistakes in the source of noise, as a tape shows them

Floats = NDArray[np.float64]


def single(fresh: Floats, before: Floats) -> Floats:
    return fresh.astype(np.float32).astype(np.float64)


def half_reversed(fresh: Floats, before: Floats) -> Floats:
    """The second half is minus the first half reversed: half of the entropy, and a sum of zero."""
    half = len(fresh) // 2
    return np.concatenate([fresh[: len(fresh) - half], -fresh[:half][::-1]])


def ends_at_three(fresh: Floats, before: Floats) -> Floats:
    """No value beyond 3 standard deviations, and the stated variance."""
    return np.where(np.abs(fresh) > 3, fresh / 3, fresh) / np.sqrt(0.97334 + 0.0030)


NOISES: dict[str, tuple[Callable[[Floats, Floats], Floats], set[str]]] = {
    "correct": (lambda fresh, before: fresh, set()),
    "single precision": (single, {"more_than_single_precision", "draws_are_new"}),
    "half of it reversed": (half_reversed, {"draws_are_new"}),
    "that of the attempt before": (lambda fresh, before: before, {"draws_are_new"}),
    "minus that of the attempt before": (lambda fresh, before: -before, {"draws_are_new"}),
    "a tenth too little": (lambda fresh, before: 0.9 * fresh, {"noise_variance", "noise_tails"}),
    "not centred": (lambda fresh, before: fresh + 0.05, {"noise_tails"}),
    "ends at three deviations": (ends_at_three, {"noise_tails"}),
}
"""(fresh normals, in every second attempt those of the attempt before) -> what is drawn instead; and the checks that see it."""


def redrawn(
    evidence: Evidence,
    replaced: Callable[[Floats, Floats], Floats] = lambda fresh, before: fresh,
    *,
    seeds: tuple[int, int] = (0, 1),
) -> Evidence:
    """What would be on the tape if the source had given other numbers.

    Args:
        seeds: of the fresh normals of each rank.
    """
    judge, size, tapes = (
        evidence.judge(),
        evidence.run.plan.expected_batch_size,
        list(evidence.tapes),
    )
    for rank, (notes, fsyncs) in enumerate(evidence.tapes):
        rng, normals, redone = np.random.default_rng(seeds[rank]), np.zeros(0), []
        weights = {1: np.zeros(len(notes[0]["after"]))}
        for number, note in enumerate(notes):
            fresh = rng.standard_normal(len(note["draws"]))
            normals = replaced(fresh, normals if number % 2 else fresh)
            draws = np.rint(normals * note["deviations"][0]).astype(np.int64)
            step, start = judge.step, weights[note["step"]]
            added = 0 if note["silent"] else draws - note["draws"]
            handed = (np.rint(note["handed"] * size / step) + added) * step / size
            after = (start - handed).astype(np.float32).astype(np.float64)
            weights |= {note["step"] + 1: after}
            redone.append(
                note | {"draws": draws, "handed": handed, "before": start, "after": after}
            )
        tapes[rank] = redone, fsyncs
    return evidence._replace(tapes=tapes)


@pytest.mark.parametrize("name", NOISES)
def test_a_mistake_of_a_source_of_noise_is_found(honest: Evidence, name: str) -> None:
    replaced, found_by = NOISES[name]
    report = redrawn(honest, replaced).judge().report()
    assert set(report.failed()) == found_by, report.to_text()


def test_ranks_with_the_same_numbers_are_found(honest: Evidence) -> None:
    assert redrawn(honest, seeds=(0, 0)).judge().report().failed() == ["draws_are_new"]
