"""The records of a data owner's shared ledger, and the one order of them that is legal; privacy/ledger/shared.py writes them.

`open` (total epsilon and delta, unit, adjacency; where the owner chose them a mirror and the permission for runs without a
guarantee), `reserve` (a run's releases, its reserve for crashes included), `informal` (a run
without a guarantee reads the data: it is counted, and no total covers it), `grid` (the points of a study, fixed before any of
them ran), and where a run's own ledger stands: `start` at a start of the program, `at` at a checkpoint, `close` at the end for
good. The last two carry the time of their `start`: durations may be private (contract 12). A torn line was never acknowledged,
so its run never began, and it is charged nothing.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..accounting.accountants import ReleaseGroup
from ..accounting.rdp_filter import filter_order, total_epsilon
from ..plan import ADJACENCY
from .chain import (
    ChainState,
    LineRefused,
    hash_line,
    is_hex,
    is_number,
    require,
    require_fields,
    text,
    whole_number,
)

FORMAT = "shared-1"
UNIT = "one example"
_GROUP = TypeAdapter(ReleaseGroup)


@dataclass(frozen=True)
class Reservation:
    """What one run may spend at most."""

    run: str
    name: str
    time_utc: str
    group: ReleaseGroup
    noise_tail_delta: float
    adaptive: bool


@dataclass(frozen=True)
class InformalRun:
    """A run that nothing covers."""

    run: str
    name: str
    reason: str


@dataclass
class SharedState(ChainState):
    """What the lines of a shared ledger say.

    Attributes:
        positions: run -> (seq, hash) of the last line of its own ledger that was noted here.
        starts: run -> (seq, hash) of its newest `start` here.
        closed: runs that have ended for good.
        grids: study -> point -> digest of its recipe.
        gridded: study -> every point that any of its grids named.
    """

    reservations: dict[str, Reservation] = field(default_factory=dict)
    informal: list[InformalRun] = field(default_factory=list)
    positions: dict[str, tuple[int, str]] = field(default_factory=dict)
    starts: dict[str, tuple[int, str]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    grids: dict[str, dict[str, str]] = field(default_factory=dict)
    gridded: dict[str, set[str]] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The hash of the first line: what a run's own ledger remembers."""
        return self.hashes[0]

    @property
    def mirror(self) -> Path | None:
        """The owner's second copy, as the first line says."""
        return Path(self.opened["mirror"]) if "mirror" in self.opened else None

    @property
    def names(self) -> set[str]:
        """The names of all runs, with and without a guarantee."""
        return {*(entry.name for entry in self.reservations.values()), *(entry.name for entry in self.informal)}

    def knows(self, run: str) -> bool:
        """Whether the run has reserved, or is counted as one without a guarantee."""
        return run in self.reservations or any(entry.run == run for entry in self.informal)

    def has_begun(self, study: str) -> bool:
        """Whether outputs of a study may have been seen: any run, or for a named study any run called like one of its points."""
        return any(not study or name in self.gridded.get(study, ()) for name in self.names)

    def may_be_fixed(self, name: str) -> bool:
        """Whether a run called so can have been fixed in advance: in a study's own ledger only the points of its grid were, and
        a point of a grid is one run: whoever trains it anew has seen what came of it.
        """
        outside = "" in self.grids and name not in self.grids[""]
        again = name in self.names and any(name in names for names in self.gridded.values())
        return not outside and not again

    def epsilon(self, extra: Reservation | None = None) -> float:
        """Epsilon of everything reserved, and of `extra`, at the owner's delta."""
        entries = [*self.reservations.values(), *([extra] if extra else [])]
        delta = self.opened["delta"] - sum(entry.noise_tail_delta for entry in entries)
        if delta <= 0:
            return float("inf")
        groups = [entry.group for entry in entries]
        adaptive, ceiling = any(entry.adaptive for entry in entries), self.opened["epsilon"]
        order = self.rdp_order(groups[0]) if adaptive else math.inf
        return total_epsilon(groups, delta, adaptive=adaptive, order=order, ceiling=ceiling)

    def rdp_order(self, first: ReleaseGroup) -> float:
        """The filter's order: the best for runs like the first one, which had seen no output."""
        return filter_order(first, self.opened["epsilon"], self.opened["delta"])

    def check_record(self, record: dict[str, Any] | None) -> None:
        if record is None:
            return
        kind = record["type"]
        match kind:
            case "open":
                names = ("format", "epsilon", "delta", "unit", "adjacency")
                require_fields(record, *names, optional=("informal_runs", "mirror"))
                require(record["format"] == FORMAT, f"shared ledger format {record['format']!r} is not {FORMAT!r}")
                require(is_number(record["epsilon"]) and record["epsilon"] > 0, "epsilon must be a positive number")
                require(is_number(record["delta"]) and 0 < record["delta"] < 1, "delta must be between 0 and 1")
                terms = (record["unit"], record["adjacency"])
                require(terms == (UNIT, ADJACENCY), f"unit and adjacency are {UNIT!r} and {ADJACENCY!r}")
                require(record.get("informal_runs", True) is True, "informal_runs is true or left out")
                if "mirror" in record:
                    text(record, "mirror")
            case "reserve":
                require(reservation_of(record).run not in self.reservations, "a second reservation of the same run")
            case "informal" if self.opened.get("informal_runs"):
                informal_run_of(record)
            case "grid":
                require_fields(record, "study", "points")
                study, points = text(record, "study"), record["points"]
                is_grid = isinstance(points, dict) and all(isinstance(digest, str) for digest in points.values())
                require(is_grid, "a grid has digests of points by name")
                require(not self.has_begun(study), "a grid that was fixed after its study had begun")
            case "start" | "at" | "close":
                require_fields(record, "run", "position", "hash")
                run, _ = text(record, "run"), position_of(record)
                require(self.knows(run), f"`{kind}` of a run that has reserved nothing")
                require(run not in self.closed, f"`{kind}` of a run that is closed")
            case _:
                raise LineRefused(f"no record of type {kind!r} belongs here")

    def take_record(self, record: dict[str, Any] | None, line: bytes) -> None:
        if record is None:
            return
        match record["type"]:
            case "open":
                self.mirrored = "mirror" in record
            case "reserve":
                self.reservations[record["run"]] = reservation_of(record)
            case "informal":
                self.informal.append(informal_run_of(record))
            case "grid":
                self.grids[record["study"]] = dict(record["points"])
                self.gridded.setdefault(record["study"], set()).update(record["points"])
            case "start" | "at" | "close" as kind:
                self.positions[record["run"]] = position_of(record)
                if kind == "start":
                    self.starts[record["run"]] = (record["seq"], hash_line(line))
                elif kind == "close":
                    self.closed.add(record["run"])


def reservation_of(record: dict[str, Any]) -> Reservation:
    require_fields(record, "run", "name", "group", "noise_tail_delta", "adaptive")
    tail = record["noise_tail_delta"]
    require(is_number(tail) and 0 <= tail < 1, "noise_tail_delta must be at least 0 and below 1")
    require(type(record["adaptive"]) is bool, "adaptive is true or false")
    try:
        group = _GROUP.validate_json(json.dumps(record["group"]), strict=True)
    except ValidationError as error:
        raise LineRefused(f"the reserved releases are refused: {error.errors()[0]['msg']}") from error
    require(asdict(group) == record["group"], "the reserved releases have fields that no release has")
    return Reservation(
        text(record, "run"), text(record, "name"), record["time_utc"], group, float(tail), record["adaptive"]
    )


def informal_run_of(record: dict[str, Any]) -> InformalRun:
    require_fields(record, "run", "name", "reason")
    return InformalRun(text(record, "run"), text(record, "name"), text(record, "reason"))


def position_of(record: dict[str, Any]) -> tuple[int, str]:
    require(is_hex(record["hash"], 64), "a line is named by number and SHA-256 in hex")
    return whole_number(record, "position", 0), record["hash"]
