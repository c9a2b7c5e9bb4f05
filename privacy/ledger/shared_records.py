"""The records of a data owner's shared ledger and their one legal order; shared.py writes them.

`open` (budget, unit, adjacency; the owner's mirror and permissions), `reserve` (a run's releases,
its reserve for crashes included), `informal` (a run without a guarantee, which no total covers),
`grid` (a study's points), and the last line of a run's own ledger at a `start` of the program, at a
checkpoint (`at`) and at the end (`close`). docs/ledger.md explains each.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..accounting.accountants import ReleaseGroup, filter_order, total_epsilon
from ..plan.numbers import ADJACENCY
from .chain import ChainState, Kind, LineRefused, hash_line, is_count, is_hex, is_number, require

FORMAT = "shared-1"
UNIT = "one example"
_GROUP = TypeAdapter(ReleaseGroup)
_PLACE: dict[str, Kind] = {"run": str, "position": is_count, "hash": is_hex}
_FIELDS: dict[str, dict[str, Kind]] = {
    "open": {
        "format": lambda value: value == FORMAT,
        "epsilon": lambda value: is_number(value) and value > 0,
        "delta": lambda value: is_number(value) and 0 < value < 1,
        "unit": lambda value: value == UNIT,
        "adjacency": lambda value: value == ADJACENCY,
        "informal_runs?": lambda value: value is True,
        "mirror?": str,
    },
    "reserve": {
        "run": str,
        "name": str,
        "group": dict,
        "noise_tail_delta": lambda value: is_number(value) and 0 <= value < 1,
        "adaptive": bool,
    },
    "informal": {"run": str, "name": str, "reason": str},
    "grid": {"study": str, "points": dict},
    "start": _PLACE,
    "at": _PLACE,
    "close": _PLACE,
}


@dataclass(frozen=True)
class Reservation:
    """The most that one run may spend.

    Attributes:
        run: commitment of the run's sampling key.
        adaptive: whether the run's parameters may depend on outputs of earlier runs.
    """

    run: str
    name: str
    time_utc: str
    group: ReleaseGroup
    noise_tail_delta: float
    adaptive: bool


@dataclass
class SharedState(ChainState):
    """The content of a shared ledger.

    Attributes:
        reservations: run -> its reservation.
        informal: run -> (name, reason) of the runs that no total covers.
        positions: run -> (seq, hash) of the newest line of its own ledger that is noted here.
        starts: run -> (seq, hash) of its newest `start` here.
        closed: runs that have ended for good.
        grids: study -> point -> digest of its recipe.
        gridded: study -> every point that any of its grids named.
    """

    FIELDS = _FIELDS
    reservations: dict[str, Reservation] = field(default_factory=dict)
    informal: dict[str, tuple[str, str]] = field(default_factory=dict)
    positions: dict[str, tuple[int, str]] = field(default_factory=dict)
    starts: dict[str, tuple[int, str]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    grids: dict[str, dict[str, str]] = field(default_factory=dict)
    gridded: dict[str, set[str]] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Returns the hash of the first line, which a run's own ledger names."""
        return self.hashes[0]

    @property
    def mirror(self) -> Path | None:
        """Returns the path of the owner's second copy, which the first line names."""
        return Path(self.opened["mirror"]) if "mirror" in self.opened else None

    @property
    def names(self) -> set[str]:
        """Returns the names of all runs, with and without a guarantee."""
        formal_names = {reservation.name for reservation in self.reservations.values()}
        informal_names = {name for name, _ in self.informal.values()}
        return formal_names | informal_names

    def knows(self, run: str) -> bool:
        """Returns whether the run has reserved, or is counted as one without a guarantee."""
        return run in self.reservations or run in self.informal

    def has_begun(self, study: str) -> bool:
        """Returns whether outputs of a study may have been seen.

        Args:
            study: "" counts every run as one of the study's; a named study has begun when a run has
                the name of one of its points.
        """
        points = self.gridded.get(study, ())
        return any(not study or name in points for name in self.names)

    def epsilon(self, extra: Reservation | None = None) -> float:
        """Returns the epsilon at the owner's delta of all reservations and of `extra`."""
        reservations = list(self.reservations.values())
        if extra is not None:
            reservations.append(extra)
        delta = self.opened["delta"] - sum(entry.noise_tail_delta for entry in reservations)
        if delta <= 0:
            return float("inf")
        groups = [entry.group for entry in reservations]
        adaptive = any(entry.adaptive for entry in reservations)
        order = self.rdp_order(groups[0]) if adaptive else math.inf
        ceiling = self.opened["epsilon"]
        return total_epsilon(groups, delta, adaptive=adaptive, order=order, ceiling=ceiling)

    def rdp_order(self, first: ReleaseGroup) -> float:
        """Returns the filter's order: the best for runs like the first, which saw no output."""
        return filter_order(first, self.opened["epsilon"], self.opened["delta"])

    def check_record(self, record: dict[str, Any] | None) -> None:
        if record is None:
            return
        match record["type"]:
            case "reserve":
                require(
                    record["run"] not in self.reservations, "a second reservation of the same run"
                )
                reservation_of(record)
            case "informal":
                require(
                    "informal_runs" in self.opened,
                    "a run without a guarantee, which the owner did not permit",
                )
            case "grid":
                digests = record["points"].values()
                require(
                    all(isinstance(digest, str) for digest in digests),
                    "a grid has digests of points by name",
                )
                require(
                    not self.has_begun(record["study"]),
                    "a grid that was fixed after its study had begun",
                )
            case "start" | "at" | "close" as kind:
                require(self.knows(record["run"]), f"`{kind}` of a run that has reserved nothing")
                require(record["run"] not in self.closed, f"`{kind}` of a run that is closed")

    def take_record(self, record: dict[str, Any] | None, line: bytes) -> None:
        if record is None:
            return
        match record["type"]:
            case "open":
                self.mirrored = "mirror" in record
            case "reserve":
                self.reservations[record["run"]] = reservation_of(record)
            case "informal":
                self.informal[record["run"]] = record["name"], record["reason"]
            case "grid":
                self.grids[record["study"]] = dict(record["points"])
                self.gridded.setdefault(record["study"], set()).update(record["points"])
            case "start" | "at" | "close" as kind:
                self.positions[record["run"]] = (record["position"], record["hash"])
                if kind == "start":
                    self.starts[record["run"]] = (record["seq"], hash_line(line))
                elif kind == "close":
                    self.closed.add(record["run"])


def reservation_of(record: dict[str, Any]) -> Reservation:
    """Returns the reservation of a `reserve` record; LineRefused where its releases are refused."""
    try:
        group = _GROUP.validate_json(json.dumps(record["group"]), strict=True)
    except ValidationError as error:
        raise LineRefused(
            f"the reserved releases are refused: {error.errors()[0]['msg']}"
        ) from error
    require(
        asdict(group) == record["group"], "the reserved releases have fields that no release has"
    )
    tail_delta = float(record["noise_tail_delta"])
    return Reservation(
        record["run"], record["name"], record["time_utc"], group, tail_delta, record["adaptive"]
    )
