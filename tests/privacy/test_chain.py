"""The one hash-chained file under both ledgers: whatever write a program dies in, nothing that was acknowledged is lost."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import PrivacyStateRefused
from privacy.ledger.chain import ChainFile, ChainState, LineRefused, create_chain, create_mirror, read_chain

TIME = "2026-01-01T00:00:00+00:00"
Died = KeyboardInterrupt


@dataclass
class Words(ChainState):
    """A ledger of words, none of which may come twice."""

    words: list[str] = field(default_factory=list)
    torn: int = 0

    def check_record(self, record: dict[str, Any] | None) -> None:
        if record is not None and record["type"] != "open" and record["word"] in self.words:
            raise LineRefused("a word comes twice")

    def take_record(self, record: dict[str, Any] | None, line: bytes) -> None:
        if record is None:
            self.torn += 1
        elif record["type"] != "open":
            self.words.append(record["word"])


def opened(path: Path) -> ChainFile[Words]:
    return ChainFile(path, Words(), "list of words", lambda state: path.with_suffix(".mirror"))


def created(folder: Path) -> Path:
    path = folder / "words.jsonl"
    create_chain(path, Words(), TIME, {})
    create_mirror(path.with_suffix(".mirror"))
    return path


def require_whole(path: Path, acknowledged: list[str]) -> None:
    """A new start accepts file and mirror, has every acknowledged word and can go on."""
    with opened(path) as chain:
        words = chain.state.words
        assert words[: len(acknowledged)] == acknowledged and len(words) <= len(acknowledged) + 1
        chain.append("word", TIME, {"word": "after"})
    data, again = path.read_bytes(), Words()
    assert path.with_suffix(".mirror").read_bytes() == data
    assert read_chain(data, again, "it") == b"" and again.words == [*words]


def test_contract_9_a_death_in_any_write_or_fsync_loses_no_acknowledged_line(tmp_path, monkeypatch, no_fsync):
    """Each system call of three starts with two words each is the last one once, a write at its first, middle and last byte."""
    real = {"write": os.write, "fsync": os.fsync}
    deaths = 0
    for fatal in range(10_000):
        for kept in (0.0, 0.01, 0.5, 0.99, 1.0):
            folder = tmp_path / f"{fatal}-{kept}"
            folder.mkdir()
            path = created(folder)
            path.write_bytes(path.read_bytes() + b'{"seq":1,"type":"wo')  # the first start repairs a torn line
            left, acknowledged = fatal, []

            def call(name, *arguments, share=kept):
                nonlocal left
                left -= 1
                if left < 0:
                    if name == "write":
                        real["write"](arguments[0], arguments[1][: round(share * len(arguments[1]))])
                    raise Died
                return real[name](*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(os, "write", lambda *arguments, call=call: call("write", *arguments))
                patch.setattr(os, "fsync", lambda *arguments, call=call: call("fsync", *arguments))
                try:
                    for start in range(3):
                        with opened(path) as chain:
                            for word in (f"{start}a", f"{start}b"):
                                chain.append("word", TIME, {"word": word})
                                acknowledged.append(word)
                except Died:
                    deaths += 1
            require_whole(path, acknowledged)
        if left >= 0:
            break
    assert deaths > 5 * 30


def test_the_mirror_is_never_ahead_of_the_file(tmp_path, monkeypatch):
    path = created(tmp_path)
    mirror, write = path.with_suffix(".mirror"), os.write

    def checked(descriptor, data):
        assert path.read_bytes().startswith(mirror.read_bytes())
        written = write(descriptor, data)
        assert path.read_bytes().startswith(mirror.read_bytes())
        return written

    monkeypatch.setattr(os, "write", checked)
    for word in "abc":
        path.write_bytes(path.read_bytes() + b"torn")
        with opened(path) as chain:
            chain.append("word", TIME, {"word": word})
    assert chain.state.torn == 3 and mirror.read_bytes() == path.read_bytes()


def test_a_file_that_is_refused_is_not_written_to(tmp_path):
    """A torn line at the end of a broken chain is no reason to write."""
    path = created(tmp_path)
    broken = path.read_bytes() + b"no record\ntorn"
    path.write_bytes(broken)
    with pytest.raises(PrivacyStateRefused, match="line 2: not a ledger record"):
        opened(path)
    assert path.read_bytes() == broken


def test_a_number_beyond_every_float_is_an_error_of_its_line(tmp_path):
    path = created(tmp_path)
    with (
        opened(path) as chain,
        pytest.raises(PrivacyStateRefused, match="refused to write `word`: an incomplete `word`"),
    ):
        chain.append("word", TIME, {"sentence": 10**400})
