"""verify.py on a published run with correlated noise: an honest one, and forgers who make it look cheaper."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from tests.privacy.published import Records, publish, rewrite
from tests.privacy.verify.judging import Judge, sentences

PLAN = make_plan(
    PlanRequest(
        num_examples=2000, expected_batch_size=100, num_steps=4, noise_multiplier=5.0, target_delta=1e-5,
        reserved_attempts=4, sensitivity_slack=1e-3, bands=3,
    )
)  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("correlated") / "run", PLAN)


@pytest.mark.full
def test_an_honest_folder_is_consistent(published: Path, judge: Judge) -> None:
    code, found = judge(published)
    assert code == 0, sentences(found) + sentences(found, "inconclusive")
    card = json.loads((published / "report/privacy_card.json").read_text())
    assert (
        found["epsilon"] == pytest.approx(card["epsilon"], abs=1e-6) == pytest.approx(PLAN.epsilon_after(5), abs=1e-6)
    )
    assert found["attested"]["groups that take turns"] == 3
    assert found["attested"]["charged attempts of the group with most of them"] == 2


def intents(edit: Callable[[dict], object]) -> Callable[[Records], None]:
    def edited(records: Records) -> None:
        for record in records:
            if record["type"] == "intent":
                edit(record)

    return edited


def more_bands(records: Records) -> None:
    """As a run of four groups would have it, so that fewer turns are charged; but the card has another epsilon."""
    other = make_plan(
        PlanRequest(
            num_examples=2000, expected_batch_size=100, num_steps=4, noise_multiplier=5.0, target_delta=1e-5,
            reserved_attempts=4, sensitivity_slack=1e-3, bands=4,
        )
    )  # fmt: skip
    records[0]["plan"] = other.frozen_fields()
    for place, record in enumerate(record for record in records if record["type"] == "intent"):
        record["group"] = place % 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (intents(lambda record: record.update(group=0)), "drew from another group"),
        (intents(lambda record: record.pop("group")), "group must be an integer"),
        (lambda records: records[0]["plan"].pop("correlated"), "sampling_threshold is not"),
        (more_bands, "config.toml asks for bands"),
    ],
)
def test_a_forged_one_is_violated(
    published: Path, tmp_path: Path, judge: Judge, edit: Callable[[Records], None], words: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    rewrite(folder, edit)
    code, found = judge(folder)
    assert code == 5 and words in sentences(found), sentences(found)
