import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import SelfComposedDpEvent, TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant

from privacy.accounting import accountants as accounting
from privacy.accounting.accountants import FINE_INTERVAL, LARGEST_DETAILED_EPSILON
from privacy.accounting.rounding import rounded_up
from privacy.card.model import STATEMENTS
from privacy.card.render import to_markdown
from privacy.errors import PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.plan.numbers import make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest
from tests.privacy.cards import privacy_card
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.ledger_files import NUMBERS

pytestmark = pytest.mark.usefixtures("no_fsync")


def _create(tmp_path, mirror=None, opened=None, **changes):
    plan = make_plan(PlanRequest(**NUMBERS | changes))
    fields = {
        "plan": plan.frozen_fields(),
        "key_commitment": "ab" * 32,
        "data_hmac": "cd" * 32,
        "commit": "c0ffee",
    }
    fields |= {"accountant": "dp-accounting 0.6.0", **(opened or {})}
    return Ledger.create(tmp_path / "ledger.jsonl", fields, mirror)


def _session(ledger, steps, *, done=True):
    ledger.start_session(
        {
            "commit": "c0ffee",
            "modified": False,
            "python": "3",
            "arguments": ["--run_dir", "/secret/place"],
        }
    )
    for step in steps:
        attempt = ledger.state.attempts[step]
        ledger.intent(step, attempt, [release_of_step(ledger.plan.noise_multiplier, 1.0)])
        if done:
            ledger.done(step, attempt)


def _crashed_run(tmp_path):
    """Three steps done, a rollback to step 2, an attempt without an end, a torn intent: six charges, three steps."""
    with _create(tmp_path) as ledger:
        _session(ledger, [1, 2, 3])
        _session(ledger, [3])
        _session(ledger, [4], done=False)
        _session(ledger, [])
        torn = b'{"seq":%d,"type":"int' % ledger.state.num_lines
    path = tmp_path / "ledger.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    return path


def _epsilon(relation, delta, count, interval=1e-4):
    """dp-accounting alone."""
    accountant = PLDAccountant(relation, interval)
    event = TruncatedSubsampledGaussianDpEvent(2000, 100 / 2000, 180, 4.0 / 1.001)
    accountant.compose(SelfComposedDpEvent(event, count))
    return accountant.get_epsilon(delta)


def test_contract_10_card_equals_an_independent_recomputation(tmp_path):
    path = _crashed_run(tmp_path)
    card = privacy_card(path)
    charged, epsilon = recompute(path)
    assert card.attempts_charged == charged == 6
    assert card.epsilon == pytest.approx(epsilon, rel=1e-9)
    numbers = card.accounting
    special, one = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
    assert numbers.epsilon_planned == pytest.approx(_epsilon(special, 1e-5, 6), rel=1e-6)
    assert numbers.epsilon_with_reserve == pytest.approx(_epsilon(special, 1e-5, 10), rel=1e-6)
    assert numbers.epsilon_replace_one == pytest.approx(_epsilon(one, 1e-5, 6), rel=1e-3)
    assert {
        float(rate): bound for rate, bound in numbers.attack.true_positive.items()
    }.items() <= set(numbers.attack.curve)
    lower, upper = numbers.epsilon_prv
    assert lower <= numbers.epsilon <= min(upper * 1.01, numbers.epsilon_rdp)
    assert numbers.epsilon < numbers.epsilon_replace_one
    assert numbers.epsilon < numbers.epsilon_group["2"] < numbers.epsilon_group["5"]


def test_card_and_page_state_what_happened_and_hide_command_lines(tmp_path):
    card = privacy_card(_crashed_run(tmp_path))
    page = to_markdown(card)
    assert rounded_up(card.epsilon) in page and "one image-text pair" in page
    assert "/secret/place" not in page and "/secret/place" not in card.to_json()
    assert min(line.count("|") for line in page.splitlines() if line.startswith("|")) >= 3
    assert card.steps_done == 3 and card.steps_planned == 6 and card.delta == 1e-5
    attempts = {
        "charged": 6,
        "allowed": 10,
        "done": 4,
        "repeats": 1,
        "torn_lines": 1,
        "torn_lines_charged": 1,
    }
    assert card.accounting.attempts.model_dump() == attempts
    assert card.formal_guarantee is True and card.reasons == ()
    assert any("ends inside a line" in line for line in card.warnings)
    assert len(card.sessions) == 4 and card.opened["commit"] == "c0ffee"
    assert card.opened["key_commitment"] == "ab" * 32
    assert card.mechanism.noise_multiplier_accounted == 4 / 1.001
    (released,) = card.mechanism.releases
    assert released == {"name": "gradient", "count": 5, "std": 4.0, "sensitivity": 1.0}
    assert "5 times, with noise of standard deviation 4 for a sensitivity of 1 |" in page


def test_epsilon_of_an_owner_comes_from_the_ledger(tmp_path):
    with _create(tmp_path, opened={"max_examples_per_owner": 2}) as ledger:
        _session(ledger, [1, 2, 3])
    card = privacy_card(tmp_path / "ledger.jsonl")
    assert card.accounting.epsilon_owner == card.accounting.epsilon_group["2"]
    assert "one owner of at most 2 examples, as the recipe states" in to_markdown(card)
    (tmp_path / "without").mkdir()
    card = privacy_card(_crashed_run(tmp_path / "without"))
    assert card.accounting.epsilon_owner is None and "one owner" not in to_markdown(card)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enabled": False, "noise_multiplier": None, "target_epsilon": 7.125}, "disabled"),
        ({"noise_multiplier": 0.0}, "noise multiplier is 0"),
        ({"sampling": "shuffle"}, "shuffle"),
        ({"informal_reasons": ("streaming | shuffle",)}, "streaming"),
    ],
)
def test_contract_11_no_epsilon_without_a_guarantee(tmp_path, changes, reason):
    with _create(tmp_path, **changes) as ledger:
        _session(ledger, [1, 2])
    card = privacy_card(tmp_path / "ledger.jsonl")
    assert card.formal_guarantee is False and reason in " ".join(card.reasons)
    assert card.epsilon is None and "7.125" not in card.to_json()
    assert "may be published" not in card.released
    page = to_markdown(card)
    assert "no formal guarantee" in page and "epsilon =" not in page and "7.125" not in page
    assert "PRV" not in page and "RDP" not in page


def test_without_privacy_the_number_of_steps_is_known_at_the_end_only(tmp_path):
    with _create(tmp_path, enabled=False) as ledger:
        ledger.start_session({})
        assert privacy_card(tmp_path / "ledger.jsonl").steps_done is None
        ledger.close("finished")
    assert privacy_card(tmp_path / "ledger.jsonl").steps_done == 6


def test_contract_9_mirror_is_stated(tmp_path):
    with _create(tmp_path, tmp_path / "mirror.jsonl") as ledger:
        _session(ledger, [1])
    card = privacy_card(tmp_path / "ledger.jsonl")
    page = to_markdown(card)
    assert "| in 1 of 1 sessions |" in page and STATEMENTS["no_mirror"] not in page
    (tmp_path / "without").mkdir()
    assert STATEMENTS["no_mirror"] in to_markdown(privacy_card(_crashed_run(tmp_path / "without")))


@pytest.mark.parametrize("cap", [None, "default"])
def test_tiny_delta_is_by_rdp_and_infinite_where_the_cap_overflows(tmp_path, cap):
    with _create(tmp_path, target_delta=1e-13, cap=cap) as ledger:
        _session(ledger, [1])
    card = privacy_card(tmp_path / "ledger.jsonl")
    assert (card.epsilon is None) == (cap == "default")
    assert card.accounting.epsilon_prv is None and card.accounting.epsilon_replace_one is None
    page = to_markdown(card)
    assert "Renyi" in page and ("no finite epsilon" in page) == (cap == "default")


@pytest.mark.timeout(120)
def test_hopeless_epsilon_is_said_to_be_hopeless(tmp_path):
    numbers = {
        "noise_multiplier": 0.3,
        "expected_batch_size": 200,
        "num_steps": 120,
        "target_delta": 1e-5,
    }
    with _create(tmp_path, **numbers) as ledger:
        _session(ledger, range(1, 121))
    card = privacy_card(tmp_path / "ledger.jsonl")
    assert (
        card.epsilon > LARGEST_DETAILED_EPSILON and card.accounting.value_interval > FINE_INTERVAL
    )
    assert card.accounting.attack is None
    assert any("protects nothing" in line for line in card.warnings)
    assert rounded_up(card.epsilon) in to_markdown(card)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"unit": 5}, "unit"),
        ({"commit": [1]}, "commit"),
        ({"accountant": {}}, "accountant"),
        ({"max_examples_per_owner": "many"}, "max_examples_per_owner"),
        ({"shared_ledger": 3}, "shared_ledger"),
        ({"tuning": ["eight"]}, "tuning"),
        ({"head": {"method": "dp-ls"}}, "num_classes"),
        ({"head": 3}, "head"),
    ],
)
def test_a_ledger_that_states_what_no_card_can_hold_is_refused_in_one_line(tmp_path, fields, place):
    with pytest.raises(PrivacyStateRefused) as error:  # noqa: PT012  # most of them cannot even be written
        _create(tmp_path, opened=fields).release()
        privacy_card(tmp_path / "ledger.jsonl")
    assert place in str(error.value) and "\n" not in str(error.value)
    assert str(tmp_path / "ledger.jsonl") in str(error.value)


@pytest.mark.parametrize("name", [3, ["gradient"], None])
def test_a_release_whose_name_no_card_can_show_is_never_written(tmp_path, name):
    with _create(tmp_path, opened={"head": {"method": "dp-ls", "num_classes": 2}}) as ledger:
        ledger.start_session({})
        with pytest.raises(PrivacyStateRefused, match="the name of a release is text"):
            ledger.intent(1, 0, [{"name": name, "std": 4.0, "sensitivity": 1.0}])


def test_a_cross_check_that_fails_is_a_warning(tmp_path, monkeypatch):
    def fail(*_):
        raise accounting.CrossCheckUnavailable("no quadrature")

    monkeypatch.setattr(accounting, "epsilon_prv", fail)
    card = privacy_card(_crashed_run(tmp_path))
    assert card.accounting.epsilon_prv is None and card.epsilon is not None
    assert any("PRV accountant fails" in line for line in card.warnings)
    assert "PRV bracket" not in to_markdown(card)


def test_ledger_is_only_read_while_its_writer_holds_it(tmp_path):
    with _create(tmp_path) as ledger:
        _session(ledger, [1])
        path = tmp_path / "ledger.jsonl"
        before, status = path.read_bytes(), path.stat()
        assert privacy_card(path).steps_done == 1
        assert path.read_bytes() == before
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == (status.st_mtime_ns, status.st_ino)
        ledger.intent(
            2, 0, [{"name": "gradient", "std": 4.0, "sensitivity": 1.0}]
        )  # the writer can go on
