"""What judging one disk teaches about the next: most of their files are equal, so most of what a start computes is.

Only functions of bytes are remembered, by all that they read, and each caller gets a copy of its own. What is refused is computed
anew, because its message names the file. A start still reads and writes every file itself.
"""

import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from privacy.ledger import chain, durable, records, shared
from privacy.ledger.chain import ChainState
from privacy.plan import PrivacyPlan

_read_chain, _from_frozen = chain.read_chain, PrivacyPlan.from_frozen


class Remembered:
    """For the judged starts of one exploration, during which nothing but the disk differs.

    Attributes:
        states: the disks that were judged, each with what had happened.
    """

    def __init__(self) -> None:
        self.states = set[int]()
        self._chains = dict[tuple[type[ChainState], bytes], bytes]()
        self._plans = dict[str, PrivacyPlan]()

    def is_new(self, disk: frozenset[tuple[str, bytes | None]], happened: list[Any]) -> bool:
        """Whether this state was not asked about before."""
        identity, known = hash((disk, tuple(map(str, happened)))), len(self.states)
        self.states.add(identity)
        return len(self.states) > known

    def read_chain(self, data: bytes, state: ChainState, name: str) -> bytes:
        assert not state.hashes, "a new state"
        key = type(state), data
        if key not in self._chains:
            tail = _read_chain(data, state, name)
            self._chains[key] = pickle.dumps((state.__dict__, tail))
        known, tail = pickle.loads(self._chains[key])
        state.__dict__.update(known)
        return bytes(tail)

    def from_frozen(self, frozen: Mapping[str, Any]) -> PrivacyPlan:
        key = repr(frozen)
        if key not in self._plans:
            self._plans[key] = _from_frozen(frozen)
        return self._plans[key]

    def watching(self, patch: pytest.MonkeyPatch) -> None:
        """Puts itself into the code that a judged start runs, and makes nothing durable: no power cut follows."""
        for module in (chain, records, shared):
            patch.setattr(module, "read_chain", self.read_chain)
        patch.setattr(PrivacyPlan, "from_frozen", self.from_frozen)
        for name in ("fsync", "fsync_directory", "fsync_path"):
            patch.setattr(durable, name, lambda _: None)
