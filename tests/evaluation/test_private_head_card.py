"""Privacy card and ledger audit of a private head: they tell what was done, and find an epsilon that is too small."""

import json
from pathlib import Path

import numpy as np
import pytest

from evaluation.private_head.rows import Rows
from evaluation.private_head.run import train_head
from privacy import verify
from privacy.audit.folder import folder_claims
from privacy.audit.ledger import audit_ledger
from privacy.audit.report import AuditReport
from privacy.card.folder import write_card
from privacy.card.render import to_markdown
from trainer.report import build_card

GIVEN = "the examples of shards:a.tar, given the encoder, whose epsilon is to be added where it has seen them"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = Rows(rng.normal(size=(60, 4)), rng.integers(0, 3, 60))
    train_head(rows, 3, "dp-newton", epsilon=1.0, delta=1e-3, output=tmp_path / "head", covers=GIVEN)
    return tmp_path / "head"


def test_the_card_describes_the_head(folder: Path) -> None:
    card = build_card(folder)
    page = to_markdown(card)
    assert card.epsilon == pytest.approx(1.0, rel=1e-2) and card.epsilon <= 1.0
    for said in ("dp-newton", "one labelled example", GIVEN, "full batch", "gradient[0]", "hessians[0]", "ridge"):
        assert said.casefold() in page.casefold(), said
    for wrong in ("DP-SGD", "AES-256", "image-text pair", "optimizer", "divisor", "Poisson", "Whole batches"):
        assert wrong not in page, wrong


def test_the_published_head_is_rechecked_by_the_file_beside_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_card(folder, build_card(folder))
    assert (folder / "verify.py").read_bytes() == Path(verify.__file__).read_bytes()
    assert verify.main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(build_card(folder).epsilon, abs=1e-6)
    stated = json.loads((folder / "head.json").read_text())
    (folder / "head.json").write_text(json.dumps(stated | {"epsilon": 0.001}))
    assert verify.main([str(folder)]) == 5 and "head.json's epsilon is 0.001" in capsys.readouterr().out


def test_the_audit_reads_head_json(folder: Path) -> None:
    def verdict() -> AuditReport:
        return audit_ledger((folder / "ledger.jsonl").read_bytes(), folder_claims(folder))

    assert verdict().verdict == "consistent"
    stated = json.loads((folder / "head.json").read_text())
    (folder / "head.json").write_text(json.dumps(stated | {"epsilon": 0.001}))
    assert verdict().verdict != "consistent" and "head.json" in str(verdict())
