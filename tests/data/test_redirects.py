"""A redirect never leads from https to http; all others are followed."""

import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from data.reading.records import RemoteOptions
from tests.data.conftest import ROOT
from tests.data.support.servers import RangeServer, range_server

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

        def said(*places: str) -> list[int | str]:
            cases = json.dumps([one.url + place for place in places])
            command = [sys.executable, "-c", READ, str(ROOT), str(tempfile.mkdtemp(dir=tmp_path)), cases]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
            assert done.returncode == 0, done.stderr
            found: list[int | str] = json.loads(done.stdout)
            return found

        assert said("/same", "/other") == [12, 12]
        for refused in said("/exposed", "/far"):
            assert isinstance(refused, str) and "\n" not in refused
            assert f"it redirects to http://{ELSEWHERE}, which is not encrypted" in refused
        [endless] = said("/loop")
        assert isinstance(endless, str) and "TooManyRedirects" in endless
        assert not elsewhere.requests


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
