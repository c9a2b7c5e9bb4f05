"""A redirect is followed only where its target could have been given as the address of the shards, and never from http."""

import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from data.errors import ReadError
from data.index.build import build_index
from data.index.shards import find_shards
from data.index.tar_index import ExampleTable
from data.reading.reader import TarReader
from data.reading.records import RemoteOptions
from tests.data.conftest import ROOT
from tests.data.servers import RangeServer, range_server

QUICK = RemoteOptions(timeout_seconds=5, tries=3, backoff_seconds=0.01, connections=4)
# The whole 127.0.0.0/8 is this machine, but only 127.0.0.1 counts as this host: 127.0.0.2 stands for another one.
ELSEWHERE = "127.0.0.2"


@pytest.fixture
def folder(shards: list[Path], tmp_path: Path) -> Path:
    for path in shards:
        (tmp_path / "served").mkdir(exist_ok=True)
        (tmp_path / "served" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "served"


@pytest.fixture
def elsewhere(folder: Path) -> Iterator[RangeServer]:
    with range_server(folder, host=ELSEWHERE) as server:
        yield server


@pytest.mark.parametrize("allow_plain_http", [False, True])
@pytest.mark.parametrize("target", ["another host", "https", "itself"])
def test_no_redirect_is_followed_from_plain_http(
    target: str, allow_plain_http: bool, folder: Path, elsewhere: RangeServer, tmp_path: Path
) -> None:
    """The network can write any answer over plain http, so even a harmless target says nothing."""
    options = RemoteOptions(**{**vars(QUICK), "allow_plain_http": allow_plain_http})
    with range_server(folder) as server:
        found = find_shards(f"{server.url}/train-{{000..002}}.tar", tmp_path)
        table = build_index(found, tmp_path / "index", remote=options)
        place = {"another host": elsewhere.url, "https": "https://host.invalid", "itself": f"{server.url}/again"}[
            target
        ]
        server.redirects["/train"] = place + "/train"
        server.requests.clear()
        reader = TarReader(ExampleTable.open(table.index_dir, server.url, remote=options, check_shards=False))
        with pytest.raises(ReadError, match="redirect over plain http is not followed") as caught:
            reader.read(0)
        assert "\n" not in str(caught.value) and f"{server.url}/train-000.tar" in str(caught.value)
        assert len(server.requests) == 1  # the answer is final
        for again in (
            lambda: ExampleTable.open(table.index_dir, server.url, remote=options),
            lambda: build_index(found, tmp_path / "other", remote=options),
        ):
            with pytest.raises(ReadError, match="redirect over plain http is not followed"):
                again()
    assert not elsewhere.requests


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
for number, (url, allow) in enumerate(json.loads(sys.argv[3])):
    options = RemoteOptions(timeout_seconds=5, tries=2, backoff_seconds=0.01, allow_plain_http=allow)
    try:
        found = find_shards(url + "/train-{000..002}.tar", Path("."))
        table = build_index(found, Path(sys.argv[2]) / str(number), remote=options)
        said.append(len(list(TarReader(table).read_all(range(len(table))))))
    except ReadError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_each_hop_over_https_is_checked(folder: Path, elsewhere: RangeServer, tmp_path: Path) -> None:
    """In a process of its own, which trusts the certificate that is made here."""
    certificate = self_signed(tmp_path / "certificate.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with range_server(folder, tls=context) as one, range_server(folder, host=ELSEWHERE, tls=context) as two:
        one.redirects = {
            "/same": one.url,
            "/other": two.url,
            "/exposed": elsewhere.url,
            "/far": f"{two.url}/exposed",
            "/loop": f"{one.url}/loop",
        }
        two.redirects = {"/exposed": elsewhere.url}
        environment = {**os.environ, "SSL_CERT_FILE": str(certificate)}

        def said(*places: str, allow_plain_http: bool) -> list[int | str]:
            cases = json.dumps([(one.url + place, allow_plain_http) for place in places])
            command = [sys.executable, "-c", READ, str(ROOT), str(tmp_path / f"indexes {allow_plain_http}"), cases]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
            assert done.returncode == 0, done.stderr
            found: list[int | str] = json.loads(done.stdout)
            return found

        assert said("/same", "/other", allow_plain_http=False) == [12, 12]
        for refused in said("/exposed", "/far", allow_plain_http=False):
            assert isinstance(refused, str) and "\n" not in refused
            assert f"it redirects to http://{ELSEWHERE}, which is not encrypted" in refused
        [endless] = said("/loop", allow_plain_http=False)
        assert isinstance(endless, str) and "TooManyRedirects" in endless
        assert not elsewhere.requests
        # Whoever starts the job may say that the whole network may know.
        assert said("/exposed", "/far", allow_plain_http=True) == [12, 12] and elsewhere.requests


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
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + certificate.public_bytes(encoding))
    return path
