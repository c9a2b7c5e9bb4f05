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
    """What one run may spend at most."""

    run: str
    name: str
    time_utc: str
    group: ReleaseGroup
    noise_tail_delta: float
    adaptive: bool


@dataclass
class SharedState(ChainState):
    """What the lines of a shared ledger say.

    Attributes:
        informal: run -> (name, reason): those that nothing covers.
        positions: run -> (seq, hash) of the last line of its own ledger that was noted here.
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
        """The hash of the first line: what a run's own ledger remembers."""
        return self.hashes[0]

    @property
    def mirror(self) -> Path | None:
        """The owner's second copy, as the first line says."""
        return Path(self.opened["mirror"]) if "mirror" in self.opened else None

    @property
    def names(self) -> set[str]:
        """The names of all runs, with and without a guarantee."""
        return {
            *(entry.name for entry in self.reservations.values()),
            *(name for name, _ in self.informal.values()),
        }

    def knows(self, run: str) -> bool:
        """Whether the run has reserved, or is counted as one without a guarantee."""
        return run in self.reservations or run in self.informal

    def has_begun(self, study: str) -> bool:
        """Whether outputs of a study may have been seen: any run, or for a named study any run called like one of its points."""
        return any(not study or name in self.gridded.get(study, ()) for name in self.names)

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
                digests = all(isinstance(digest, str) for digest in record["points"].values())
                require(digests, "a grid has digests of points by name")
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
    try:
        group = _GROUP.validate_json(json.dumps(record["group"]), strict=True)
    except ValidationError as error:
        raise LineRefused(
            f"the reserved releases are refused: {error.errors()[0]['msg']}"
        ) from error
    require(
        asdict(group) == record["group"], "the reserved releases have fields that no release has"
    )
    tail = float(record["noise_tail_delta"])
    return Reservation(
        record["run"], record["name"], record["time_utc"], group, tail, record["adaptive"]
    )
