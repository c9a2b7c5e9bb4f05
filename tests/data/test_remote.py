"""Shards over HTTP against the same shards on disk; every way in which a network fails; and redirects."""

import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from data.errors import DataError, ReadError
from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.index.build import build_index
from data.index.shards import find_shards
from data.index.tar_index import ExampleTable
from data.reading.loader import Loader
from data.reading.reader import TarReader
from data.reading.records import RemoteOptions
from privacy.step.batches import StepBatch
from tests.data.conftest import ROOT
from tests.data.support.servers import RangeServer, range_server
from tests.distributed.ranks import free_port

QUICK = RemoteOptions(timeout_seconds=2, tries=3, backoff_seconds=0.01, connections=4)
MAKE = CaptionExample(image_size=16, num_tokens=12, tokenizer_path=EMBEDDED_TOKENIZER)


@pytest.fixture
def server(shards: list[Path], tmp_path: Path) -> Iterator[RangeServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    for path in shards:
        (folder / path.name).write_bytes(path.read_bytes())
    with range_server(folder) as server:
        yield server


@pytest.fixture
def remote(server: RangeServer, tmp_path: Path) -> ExampleTable:
    found = find_shards(f"{server.url}/train-{{000..002}}.tar", tmp_path)
    return build_index(found, tmp_path / "remote", remote=QUICK)


def using(table: ExampleTable, **options: object) -> TarReader:
    return TarReader(
        ExampleTable.open(
            table.index_dir, table.shard_root, remote=replace(QUICK, **options), check_shards=False
        )
    )


def test_index_and_examples_equal_those_of_the_folder(
    remote: ExampleTable, table: ExampleTable
) -> None:
    assert remote.manifest_digest() == table.manifest_digest()
    extents = [next(t.index_dir.glob("extents-*")) for t in (remote, table)]
    assert extents[0].name == extents[1].name and extents[0].read_bytes() == extents[1].read_bytes()
    assert all(entry.version.startswith('etag:"') for entry in remote.entries)  # the ETag
    ids = np.random.default_rng(0).permutation(12)
    assert list(TarReader(remote).read_all(ids)) == list(TarReader(table).read_all(ids))


@pytest.mark.parametrize("fault", [500, 503, 429, "hang", "cut", "garbage"])
def test_passing_faults_are_tried_again(
    fault: int | str, server: RangeServer, remote: ExampleTable
) -> None:
    expected = TarReader(remote).read(3)
    server.faults.extend([fault, fault])
    assert using(remote, timeout_seconds=0.3).read(3) == expected
    assert not server.faults


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([500] * 3, "in 3 tries"),
        (["hang"] * 3, "in 3 tries"),
        (["cut"] * 3, "in 3 tries"),
        (["garbage"] * 3, "the bytes changed"),
        ([404], "it is gone"),
        ([403], "access is refused"),
        ([412], "it changed since it was indexed"),
        (["whole"], "does not serve ranges"),
    ],
)
def test_lasting_faults_are_one_clear_read_error(
    faults: list[int | str], message: str, server: RangeServer, remote: ExampleTable
) -> None:
    server.faults.extend(faults)
    before = len(server.requests)
    with pytest.raises(ReadError, match=message) as caught:
        using(remote, timeout_seconds=0.3).read(3)
    assert f"{server.url}/train-000.tar" in str(caught.value) and "\n" not in str(caught.value)
    assert len(server.requests) - before == len(faults)


def test_a_read_error_ends_the_step_and_is_no_zero_gradient(
    server: RangeServer, remote: ExampleTable
) -> None:
    server.faults.extend([403])
    loader = Loader(remote, MAKE, micro_batch_size=3, num_workers=1)
    plan = StepBatch(0, np.array([1]), np.array([1], dtype=np.uint64), 1)
    with pytest.raises(ReadError, match="access is refused"):
        list(loader.steps(iter([plan])))


def test_an_index_may_be_made_elsewhere(server: RangeServer, table: ExampleTable) -> None:
    """Times of files say nothing about copies on a server; the checksum of every read does."""
    moved = ExampleTable.open(table.index_dir, server.url, remote=QUICK)
    assert list(TarReader(moved).read_all(range(12))) == list(TarReader(table).read_all(range(12)))
    shard = server.folder / "train-000.tar"
    flipped = bytearray(shard.read_bytes())
    flipped[700] ^= 1
    shard.write_bytes(flipped)
    with pytest.raises(ReadError, match="the bytes changed"):
        TarReader(moved).read(0)


def test_changed_and_vanished_shards(
    server: RangeServer, remote: ExampleTable, tmp_path: Path
) -> None:
    shard = server.folder / "train-000.tar"
    original = shard.read_bytes()
    shard.write_bytes(original[:-512] + b"\1" * 512)  # of the same size, and no example differs
    with pytest.raises(ReadError, match="it changed since it was indexed"):
        TarReader(remote).read(0)
    with pytest.raises(DataError, match="written after it was indexed"):
        ExampleTable.open(remote.index_dir, remote.shard_root, remote=QUICK)
    shard.write_bytes(original[:1024])
    with pytest.raises(DataError, match="its index says"):
        ExampleTable.open(remote.index_dir, remote.shard_root, remote=QUICK)
    shard.unlink()
    with pytest.raises(ReadError, match="it is gone"):
        TarReader(remote).read(0)
    with pytest.raises(DataError, match="missing or empty shards"):
        ExampleTable.open(remote.index_dir, remote.shard_root, remote=QUICK)
    shard.write_bytes(original)
    assert len(ExampleTable.open(remote.index_dir, remote.shard_root, remote=QUICK)) == 12


def test_a_refused_connection(remote: ExampleTable) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ReadError, match=r"in 3 tries: .*[Cc]onnect"):
        TarReader(
            ExampleTable.open(remote.index_dir, nobody, remote=QUICK, check_shards=False)
        ).read(0)
    with pytest.raises(ReadError, match="in 3 tries"):
        ExampleTable.open(remote.index_dir, nobody, remote=QUICK)


@pytest.mark.parametrize(("connections", "most_bytes", "most"), [(2, 64 << 20, 6), (16, None, 3)])
def test_reading_ahead_is_bounded(
    connections: int,
    most_bytes: int | None,
    most: int,
    server: RangeServer,
    remote: ExampleTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the number of requests, and by the bytes of two examples."""
    monkeypatch.setattr(
        "data.reading.remote._MAX_BYTES_AHEAD", most_bytes or int(remote.extents(0).lengths[0]) * 2
    )
    before = len(server.requests)
    examples = using(remote, connections=connections).read_all([0] * 20)
    next(examples)
    threading.Event().wait(0.3)
    assert len(server.requests) - before <= most
    assert len(list(examples)) == 19


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("https://user:secret@host/a.tar", "password"),
        ("https://host/a.tar?signature=secret", "query"),
        ("https://host/*.tar", "not a single shard"),
        ("https://host/folder/", "not a single shard"),
        ("https://host/a.tar,https://other/b.tar", "several hosts"),
        (
            "https://user:secret@host/a.tar?token=secret,local.tar",
            r"https://host/a\.tar,local\.tar mixes",
        ),
        (
            "pipe:curl https://user:secret@host/a.tar?token=secret",
            r"pipe:curl https://host/a\.tar is a command",
        ),
        ("http://example.invalid/a.tar", "is not encrypted"),
        ("nothing://host/a.tar", "no driver for nothing://"),
        ("s3://bucket/a.tar", "s3fs"),
    ],
)
def test_places_that_cannot_be_read(pattern: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        build_index(find_shards(pattern, tmp_path), tmp_path / "index", remote=QUICK)
    assert "secret" not in str(caught.value) and not (tmp_path / "index").exists()


def test_url_patterns(tmp_path: Path) -> None:
    found = find_shards("https://host/x/{a,b}/{08..10}.tar, https://host/x/c.tar", tmp_path)
    assert found.root == "https://host/x" and found.is_remote
    assert found.names == (
        "a/08.tar",
        "a/09.tar",
        "a/10.tar",
        "b/08.tar",
        "b/09.tar",
        "b/10.tar",
        "c.tar",
    )
    assert find_shards("s3://bucket/only.tar", tmp_path).locations() == ["s3://bucket/only.tar"]


def test_any_driver_of_fsspec_will_do(
    shards: list[Path], table: ExampleTable, tmp_path: Path
) -> None:
    memory = fsspec.filesystem("memory")
    for path in shards:
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    found = find_shards("memory://bucket/train-{000..002}.tar", tmp_path)
    other = build_index(found, tmp_path / "memory", remote=QUICK)
    assert other.manifest_digest() == table.manifest_digest()
    assert list(TarReader(other).read_all(range(12))) == list(TarReader(table).read_all(range(12)))
    memory.rm("/bucket/train-001.tar")
    with pytest.raises(ReadError, match=r"cannot read memory://bucket/train-001\.tar"):
        TarReader(other).read(7)


# The whole 127.0.0.0/8 is this machine, but only 127.0.0.1 counts as this host: 127.0.0.2 stands for another one.
ELSEWHERE = "127.0.0.2"


READ = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from data.errors import ReadError
from data.index.build import build_index
from data.reading.reader import TarReader
from data.index.shards import find_shards
from data.reading.records import RemoteOptions
said = []
for number, url in enumerate(json.loads(sys.argv[3])):
    options = RemoteOptions(timeout_seconds=5, tries=2, backoff_seconds=0.01)
    try:
        found = find_shards(url + "/train-{000..002}.tar", Path("."))
        table = build_index(found, Path(sys.argv[2]) / str(number), remote=options)
        said.append(len(list(TarReader(table).read_all(range(len(table))))))
    except ReadError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_a_redirect_never_leads_from_https_to_http(server: RangeServer, tmp_path: Path) -> None:
    """All others are followed. In a process of its own, which trusts the certificate that is made here."""
    folder = server.folder
    certificate = self_signed(tmp_path / "certificate.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with (
        range_server(folder, host=ELSEWHERE) as elsewhere,
        range_server(folder, tls=context) as one,
        range_server(folder, host=ELSEWHERE, tls=context) as two,
        range_server(folder, host=ELSEWHERE, tls=context) as failing,
    ):
        failing.faults.extend([503] * 20)
        one.redirects = {
            "/same": one.url,
            "/other": two.url,
            "/exposed": elsewhere.url,
            "/far": f"{two.url}/exposed",
            "/loop": f"{one.url}/loop",
            "/signed": f"{failing.url}/x?signature=secret&path=",
        }
        two.redirects = {"/exposed": elsewhere.url}
        cases = json.dumps(
            [
                one.url + place
                for place in ("/same", "/other", "/exposed", "/far", "/loop", "/signed")
            ]
        )
        command = [sys.executable, "-c", READ, str(ROOT), str(tmp_path), cases]
        environment = {**os.environ, "SSL_CERT_FILE": str(certificate)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
        assert done.returncode == 0, done.stderr
        *followed, exposed, far, endless, signed = json.loads(done.stdout)
        assert followed == [12, 12] and "TooManyRedirects" in endless and not elsewhere.requests
        assert "503" in signed and f"{failing.url}/x" in signed and "secret" not in signed
        for refused in (exposed, far):
            assert (
                f"it redirects to http://{ELSEWHERE}, which is not encrypted" in refused
                and "\n" not in refused
            )


def self_signed(path: Path) -> Path:
    """A certificate for both addresses, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    addresses = [x509.IPAddress(ipaddress.ip_address(host)) for host in ("127.0.0.1", ELSEWHERE)]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(encoding))
    return path
