"""The privacy card's attested part: every number in it comes from the bytes of one ledger.jsonl and nothing else.

Headings and their order follow the reporting checklist of "How to DP-fy ML" (Ponomareva et al. 2023, arXiv
2303.00654). The card is plain data, ready for JSON; privacy/card/markdown.py renders it.
Nothing is written and no lock is taken, so a card can be made while the run goes on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privacy.card.mechanism import mechanism, sampling
from privacy.card.numbers import accounting_numbers
from privacy.card.warnings import NO_MIRROR, card_warnings
from privacy.errors import PrivacyStateRefused
from privacy.ledger.chain import TORN_MARK, hash_line
from privacy.ledger.records import LedgerState, read_state
from privacy.plan import PrivacyPlan

CARD_FORMAT = 1


@dataclass(frozen=True)
class LedgerSnapshot:
    """One reading of a ledger, so that all numbers of a card speak of the same moment.

    Attributes:
        state: the verified state; an unterminated last line is charged as its repair would charge it.
        records: every whole record, in order.
        last_hash: SHA-256 of the last whole line.
        num_torn: torn lines, the unterminated one included.
        unterminated: the file ends inside a line: a crash, or a write that is under way right now.
    """

    state: LedgerState
    records: list[dict[str, Any]]
    last_hash: str
    num_torn: int
    unterminated: bool

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] == kind]


def read_snapshot(path: Path | str) -> LedgerSnapshot:
    """Reads and verifies a ledger once, without touching it; PrivacyStateRefused (exit 4) names what is broken."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PrivacyStateRefused(f"{path}: cannot read the ledger: {error.strerror or error}") from error
    state, tail = read_state(data, str(path))
    if tail:
        state.absorb(tail + TORN_MARK)
    lines = data.split(b"\n")[:-1]
    whole = [line for line in lines if not line.endswith(TORN_MARK)]
    num_torn = len(lines) - len(whole) + bool(tail)
    return LedgerSnapshot(state, [json.loads(line) for line in whole], hash_line(lines[-1]), num_torn, bool(tail))


def privacy_card(path: Path | str) -> dict[str, Any]:
    """The attested card of the run whose ledger is at `path` (a few seconds).

    Without a formal guarantee the card holds no epsilon at all, not even a planned or a targeted one. An epsilon that
    is infinite, or that the accountant does not give at this delta, is None.

    Raises:
        PrivacyStateRefused: the ledger cannot be read or is broken.
    """
    snapshot = read_snapshot(path)
    plan = snapshot.state.plan
    numbers = accounting_numbers(snapshot.state, plan)
    card = {
        "card_format": CARD_FORMAT,
        "formal_guarantee": plan.formal_guarantee,
        "reasons": list(plan.reasons),
        "epsilon": numbers["epsilon"],
        "delta": plan.target_delta,
        "steps_done": _steps_done(snapshot.state, plan),
        "steps_planned": plan.num_steps,
        "attempts_charged": snapshot.state.num_charged,
        "warnings": [],
        "setting": _setting(),
        "released": _released(snapshot),
        "unit_of_privacy": _unit(snapshot, plan),
        "adjacency": _adjacency(),
        "mechanism": mechanism(snapshot, plan),
        "sampling": sampling(snapshot, plan),
        "accounting": numbers | _attempts(snapshot, plan),
        "tuning": _tuning(snapshot),
        "public_data": _public_data(),
        "logged_without_noise": _logged_without_noise(),
        "not_covered": _not_covered(snapshot),
        "provenance": _provenance(snapshot),
    }
    card["warnings"] = card_warnings(plan, card, unterminated=snapshot.unterminated, mirrored=snapshot.state.mirrored)
    return card


def _steps_done(state: LedgerState, plan: PrivacyPlan) -> int | None:
    """The highest step that is done. Without privacy the ledger records no steps, only that the run has finished."""
    if plan.enabled:
        return state.last_done_step
    return plan.num_steps if state.closed == "finished" else None


# The sections, in the order of the checklist


def _setting() -> dict[str, Any]:
    return {
        "model": "central differential privacy",
        "statement": (
            "The trainer sees the data in the clear and is trusted, together with the machines that it runs on, "
            "whoever operates them and the console of the job. The folder `private/` of the run (mode 0700) is inside "
            "the trust boundary. Everybody else is an adversary who may see all of the rest of the run folder, knows "
            "the code and all parameters, and may know every other record of the data."
        ),
    }


def _released(snapshot: LedgerSnapshot) -> dict[str, Any]:
    checkpoints = [
        {"step": record["step"], "name": record.get("path"), "manifest_sha256": record["digest"]}
        for record in snapshot.of_type("checkpoint")
    ]
    return {
        "statement": _released_statement(snapshot),
        "checkpoints_recorded": len(checkpoints),
        "last_checkpoint": checkpoints[-1] if checkpoints else None,
    }


def _released_statement(snapshot: LedgerSnapshot) -> str:
    if not snapshot.state.plan.formal_guarantee:
        return _NOTHING_CLAIMED
    return _RELEASED if "head" not in snapshot.state.opened else _RELEASED_HEAD


_RELEASED = (
    "The guarantee covers the weights and the optimizer state after every step, not only the last ones: all "
    "checkpoints, and everything else in the run folder outside of `private/`, may be published together, "
    "with the exceptions of section 11."
)
_RELEASED_HEAD = (
    "The guarantee covers the weights of the head (`head.safetensors`) and the noised statistics behind them. It does not cover "
    "the features, accuracies on private data, or the choice of one head among several."
)
_NOTHING_CLAIMED = "This run makes no formal claim: treat everything that it wrote as if it were the training data."


def _unit(snapshot: LedgerSnapshot, plan: PrivacyPlan) -> dict[str, Any]:
    opened = snapshot.state.opened
    given = opened.get("head", {}).get("covers")
    return {
        "unit": opened.get("unit", "one image-text pair" if "head" not in opened else "one labelled example"),
        "num_examples": plan.num_examples,
        "statement": (
            "Where there is a guarantee, a person or a picture that occurs in several examples has only the weaker group "
            "epsilon of section 7, not that of the headline."
        )
        + (f" The guarantee is of {given}." if given else ""),
        "deduplication": _stated(snapshot, "deduplication"),
    }


def _stated(snapshot: LedgerSnapshot, name: str) -> dict[str, Any]:
    """What the `open` record says about `name`; other files may fill it in where the ledger is silent."""
    text = snapshot.state.opened.get(name)
    return {"text": text, "file": "ledger.jsonl", "attested": True} if text else {"text": None}


def _adjacency() -> dict[str, Any]:
    return {
        "relation": "zero_out",
        "statement": (
            "Two data sets are neighbours when they differ in one record that is replaced by one that contributes "
            "nothing (zero-out, the counterpart of add-or-remove for a public number of examples). The number of "
            "examples n and the expected batch size are therefore public. The epsilon for replacing a record by an "
            "arbitrary other one is given beside the claim."
        ),
    }


def _tuning(snapshot: LedgerSnapshot) -> dict[str, Any]:
    return {
        "included": False,
        "statement": (
            "The cost of choosing hyper-parameters is not included in epsilon. The epsilon is that of this one run; other "
            "runs on the same data, among them those that chose its hyper-parameters, compose with it."
        ),
        "stated": _stated(snapshot, "tuning"),
        # The hash of its first line; its content, where it can be read, comes from that other file.
        "shared_ledger": {"identity": snapshot.state.opened.get("shared_ledger"), "summary": None},
    }


def _public_data() -> dict[str, Any]:
    return {"statement": "The ledger says nothing about pre-training: what is known comes from other files."}


def _logged_without_noise() -> dict[str, Any]:
    return {
        "where": "private/ (mode 0700)",
        "quantities": [
            "training loss, clipped fraction, mean gradient norm before noise",
            "realised batch sizes, non-finite and undecodable examples",
            "timings, waiting for data and memory: they tell how long single examples take to decode",
            "the data's manifest and index, the sampling key",
            "held-out losses and captions, unless the recipe declares the held-out data public",
        ],
        "statement": (
            "These quantities are computed from the data without noise. They were written to `private/` and to the "
            "console only, carry no guarantee and must not be published. None of them was read for this card."
        ),
    }


def _not_covered(snapshot: LedgerSnapshot) -> dict[str, Any]:
    points = [
        "Whether the program did what the ledger says. An audit of the run is the means for that (section 13).",
        "A ledger forged as a whole: the hash chain finds edits only against a hash kept elsewhere. Keep the hash of "
        "the last line (section 12) outside of the run folder.",
        "Time: how long a step takes tells of single examples. All records of the ledger repeat the time at which the program "
        "that opened it was started, and public metrics carry no time; but the modification times of files do, and so does the "
        "step at which a run was stopped by a clock (train.max_minutes, a scheduler's limit).",
        "Floating-point noise: it is drawn and added in double precision, but not from a discrete distribution; "
        "attacks on its rounding are assumed away.",
        "Other runs and releases on the same data, and choices made after looking at the data (tokenizer, filters, "
        "recipe).",
        "Held-out data: losses and captions of it are published only where the recipe declares it public.",
        "What `private/`, the console or the machines leak by themselves.",
    ]
    if not snapshot.state.mirrored:
        points.insert(2, NO_MIRROR)
    return {"points": points}


def _provenance(snapshot: LedgerSnapshot) -> dict[str, Any]:
    opened, sessions = snapshot.state.opened, snapshot.of_type("session")
    return {
        "commit": opened.get("commit"),
        "opened_utc": opened["time_utc"],
        "closed": snapshot.state.closed,
        "ledger": {
            "file": "ledger.jsonl",
            "format": opened["format"],
            "lines": snapshot.state.num_lines,
            "last_line_sha256": snapshot.last_hash,
            "mirrored_sessions": sum(record["mirror"] for record in sessions),
        },
        "sessions": [_session(record) for record in sessions],
    }


def _session(record: dict[str, Any]) -> dict[str, Any]:
    environment = record.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    # The command line stays out: it may name folders that are nobody's business.
    known = {name: environment.get(name) for name in ("commit", "modified", "python", "packages")}
    return {"mirror": record["mirror"], **known}


def _attempts(snapshot: LedgerSnapshot, plan: PrivacyPlan) -> dict[str, Any]:
    state = snapshot.state
    return {
        "attempts": {
            "charged": state.num_charged,
            "allowed": plan.max_intents,
            "done": len(snapshot.of_type("done")),
            "repeats": sum(intent.attempt > 0 for intent in state.intents),
            "torn_lines": snapshot.num_torn,
            "torn_lines_charged": state.charged_torn,
        }
    }
