"""`report.py --publish` prints two values to keep elsewhere, and an RFC 3161 authority stamps them: here a local `openssl ts`."""

import hashlib
import shlex
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from launch_scripts.report import ReportOptions, report
from privacy.card.ledger_card import read_snapshot
from privacy.card.model import LedgerFile
from tests.privacy.published import publish
from trainer.errors import ConfigError
from trainer.publish import fingerprint

SETTINGS = """
[tsa]
default_tsa = local
[local]
serial = {folder}/serial
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
"""


def openssl(arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["openssl", *shlex.split(arguments)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address, certificate) of an authority that answers at /stamp, and nonsense elsewhere."""
    folder = tmp_path_factory.mktemp("authority")
    (folder / "settings").write_text(SETTINGS.format(folder=folder))
    (folder / "serial").write_text("01\n")
    use = (
        "-addext extendedKeyUsage=critical,timeStamping -addext keyUsage=critical,digitalSignature"
    )
    made = openssl(
        f"req -x509 -newkey rsa:2048 -nodes -keyout key -out ca.pem -subj /CN=stamps -days 2 {use}",
        folder,
    )
    assert made.returncode == 0, made.stderr

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            (folder / "query").write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/timestamp-query"
            said = openssl(
                "ts -reply -config settings -queryfile query -signer ca.pem -inkey key -out answer",
                folder,
            )
            assert said.returncode == 0, said.stderr
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                (folder / "answer").read_bytes() if self.path == "/stamp" else b"<html>"
            )

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder / "ca.pem"
    server.shutdown()


def test_two_values_are_printed_stamped_and_checked_by_the_printed_command(
    authority: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (address, certificate), run = authority, publish(tmp_path / "run")
    report(ReportOptions(run_dir=run, publish=tmp_path / "plain"))
    said, place = capsys.readouterr().out, tmp_path / "plain/report"
    last = read_snapshot(run / "ledger.jsonl").last_hash
    judge = hashlib.sha256((run / "verify.py").read_bytes()).hexdigest()
    assert (
        f"keep elsewhere: last line of ledger.jsonl: {last}\n" in said
        and f"SHA-256 of verify.py: {judge}\n" in said
    )
    assert "not time-stamped" in said and not (place / "fingerprint.tsr").exists()
    assert (
        openssl(
            "ts -query -data fingerprint.txt -sha256 -no_nonce -cert -out own", place
        ).returncode
        == 0
    )
    assert (place / "own").read_bytes() == (place / "fingerprint.tsq").read_bytes()

    report(ReportOptions(run_dir=run, publish=tmp_path / "stamped", time_stamp=f"{address}/stamp"))
    said, place = capsys.readouterr().out, tmp_path / "stamped/report"
    (command,) = (
        line.partition("openssl ")[2] for line in said.splitlines() if "openssl ts -verify" in line
    )
    checked = openssl(command.replace("AUTHORITY.pem", str(certificate)), place.parent)
    assert checked.returncode == 0 and "Verification: OK" in checked.stdout + checked.stderr, (
        checked
    )
    (place / "fingerprint.txt").write_text(
        (place / "fingerprint.txt").read_text().replace(last, "00" * 32)
    )
    assert openssl(command.replace("AUTHORITY.pem", str(certificate)), place.parent).returncode != 0

    (run / "verify.py").write_text("# another one\n")  # the answer is of other values, and goes
    report(ReportOptions(run_dir=run, publish=tmp_path / "later"))
    assert (
        "not time-stamped" in capsys.readouterr().out
        and not (run / "report/fingerprint.tsr").exists()
    )


@pytest.mark.parametrize(
    "place", ["{address}/nonsense", "http://127.0.0.1:1/", "file:///etc/passwd", "stamps"]
)
def test_no_stamp_is_one_line_before_anything_is_published(
    place: str, authority: tuple[str, Path], tmp_path: Path
) -> None:
    ledger = LedgerFile(lines=3, last_line_sha256="ab" * 32)
    with pytest.raises(ConfigError, match="nothing was published") as error:
        fingerprint(tmp_path, ledger, place.format(address=authority[0]))
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="give --publish"):
        report(ReportOptions(run_dir=tmp_path, time_stamp="https://example.org"))
