import contextlib
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from privacy.boundary import PUBLISHED, Private, Public, Reason
from tests.privacy.published import read_metrics
from trainer.loop.heldout import HeldoutResults
from trainer.loop.metrics import PrivateMetrics, PublicMetrics, Session, as_fp32
from trainer.loop.reporting import last_step, write_public
from trainer.tasks.base import Samples


@pytest.mark.parametrize("torn", ['{"step": 2, "pri', '{"step": 2, "privacy/epsilon": 0.7}', "{"])
def test_a_torn_last_line(tmp_path: Path, torn: str) -> None:
    """A killed process leaves half a line; the next start appends after it and loses nothing of its own."""
    writer = PrivateMetrics(tmp_path)
    writer.scalars(1, {"privacy/epsilon": Private(0.5)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    writer = PrivateMetrics(tmp_path)
    writer.scalars(3, {"privacy/epsilon": Private(0.8)})
    writer.close()
    found = [line["step"] for line in read_metrics(tmp_path)]
    assert found[0] == 1 and found[-1] == 3 and len(found) <= 3


def test_public_events_have_no_clock_and_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume and next to a file that a kill tore; equal numbers are equal bytes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for folder, clock in ((tmp_path / "one", 1e9), (tmp_path / "two", 2e9)):
        folder.mkdir()
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        for step in (1, 2):
            writer = PublicMetrics(folder)
            writer.scalars(step, {"privacy/epsilon": Public(step / 2, Reason.CHARGED)})
            writer.text(step, "heldout/samples", Public("words", Reason.DECLARED))
            writer.picture(
                step,
                "heldout/samples",
                Public(np.zeros((6, 10, 3), dtype=np.uint8), Reason.DECLARED),
            )
            writer.close()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        events = [
            event
            for path in files
            if path.name != "metrics.jsonl"
            for event in EventFileLoader(str(path)).Load()
        ]
        assert {event.wall_time for event in events} == {0.0, 1.0, 2.0}
        assert all(event.wall_time == event.step for event in events)
        found.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert found[0] == found[1] and len(found[0]) == 3
    torn = tmp_path / "one/tensorboard/events.out.tfevents.0000000002"
    torn.write_bytes(torn.read_bytes()[:-5])
    writer = PublicMetrics(tmp_path / "one")
    writer.scalars(3, {"privacy/epsilon": Public(1.5, Reason.CHARGED)})
    writer.close()
    accumulated = EventAccumulator(str(tmp_path / "one/tensorboard"))
    accumulated.Reload()
    assert [event.step for event in accumulated.Scalars("privacy/epsilon")] == [1, 2, 3]


@pytest.mark.parametrize("is_private", [True, False])
def test_a_start_takes_the_place_of_the_steps_that_it_repeats(
    tmp_path: Path, *, is_private: bool
) -> None:
    """What was measured at the checkpoint stays, and so does all of a start at the last step, which repeats nothing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    starts = [
        (0, {}, range(6)),
        (3, {1: 1, 2: 1, 3: 1, 4: 1, 5: 2}, range(4, 7)),
        (6, dict.fromkeys(range(1, 7), 3), ()),
    ]
    for number, (step, attempts, steps) in enumerate(starts):
        session = Session(step, attempts, number)
        writer = (
            PrivateMetrics(tmp_path, session) if is_private else PublicMetrics(tmp_path, session)
        )
        for done in steps:
            value = done + 100.0 * number
            box = Private(value) if is_private else Public(value, Reason.NOISED)
            writer.scalars(done, {"optimizer/noised_grad_norm": box})  # type: ignore[dict-item]
        writer.close()
    events = (
        EventAccumulator(str(tmp_path / "tensorboard"))
        .Reload()
        .Scalars("optimizer/noised_grad_norm")
    )
    assert [(event.step, event.value) for event in events] == [
        *((step, float(step)) for step in range(4)),
        *((step, step + 100.0) for step in range(4, 7)),
    ]
    lines = [(line["step"], line["attempt"]) for line in read_metrics(tmp_path)]
    assert lines == [*((step, 0) for step in range(6)), (4, 1), (5, 2), (6, 0)]


@pytest.mark.parametrize("is_charged", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_after_any_kills_no_line_is_there_twice_and_no_text_steps_back(
    tmp_path: Path, seed: int, *, is_charged: bool
) -> None:
    """Starts that die anywhere, from the beginning on; without charges lines have no attempt."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rng, charged, step = np.random.default_rng(seed), Counter[int](), 0
    for number in range(12):
        writer = PublicMetrics(
            tmp_path, Session(step, dict(charged) if is_charged else None, number)
        )
        last = step + int(rng.integers(0, 6))
        for done in range(step if step == 0 else step + 1, last + 1):
            charged.update([done] * (done > 0))
            if rng.random() < 0.9:  # an attempt that ends before its line stays charged
                writer.scalars(done, {"heldout/loss": Public(1.0, Reason.DECLARED)})
                writer.text(done, "heldout/samples", Public("words", Reason.DECLARED))
        writer.close()
        step = int(rng.integers(step, last + 1)) if number > 4 else 0
    lines = [(line["step"], line.get("attempt")) for line in read_metrics(tmp_path)]
    assert not is_charged or len(set(lines)) == len(lines) > 12
    assert {attempt is None for _, attempt in lines} == {not is_charged}
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("heldout/samples")]
    texts = {tag: [event.step for event in events.Tensors(tag)] for tag in tags}
    assert len(texts) > 2 and sum(map(len, texts.values())) == len(lines)
    assert all(before < after for steps in texts.values() for before, after in pairwise(steps)), (
        texts
    )


@pytest.mark.parametrize("kill_at", ["scalars", "text", "picture"])
def test_a_kill_while_results_are_written_has_no_line_written_again(
    tmp_path: Path, kill_at: str
) -> None:
    """Of the last step, which is not repeated: a start that finds its line in heldout.jsonl measures nothing again."""
    samples = Samples(np.zeros((6, 10, 3), dtype=np.uint8), [("a", "b")])
    results = Public(HeldoutResults({"loss": 1.0}, {}, None, samples), Reason.DECLARED)
    for start, victim in enumerate((kill_at, None)):
        writer = PublicMetrics(tmp_path, Session(4 * start, {4: start}, start))
        if victim is not None:
            setattr(writer, victim, die)
        with contextlib.suppress(SystemExit):
            if last_step(tmp_path / "heldout.jsonl") != 4:
                write_public(4, results, writer, tmp_path)
        writer.close()
    for file in ("metrics.jsonl", "heldout.jsonl"):
        lines = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        assert [(line["step"], line["attempt"]) for line in lines] in ([], [(4, 0)])
    assert last_step(tmp_path / "heldout.jsonl") == 4


def die(*_: object) -> None:
    raise SystemExit(9)


def test_published_floats_are_rounded_to_fp32(tmp_path: Path) -> None:
    """What is left of a sum's last bits, of which fp64 has many more, says nothing; whole numbers stay whole."""
    rng, name = np.random.default_rng(0), "optimizer/noised_grad_norm"
    values = [float(x) for x in rng.standard_normal(200) * 10.0 ** rng.integers(-30, 30, 200)]
    writer = PublicMetrics(tmp_path)
    for value in values:
        writer.scalars(1, {name: Public(value, Reason.NOISED)})
    more = {
        "privacy/charged_attempts": Public(3, Reason.CHARGED),
        "heldout/loss": Public(float("nan"), Reason.DECLARED),
    }
    writer.scalars(2, more)
    writer.close()
    *lines, last = read_metrics(tmp_path)
    for value, line in zip(values, lines, strict=True):
        assert np.float32(line[name]) == np.float32(value)
        assert line[name] == as_fp32(line[name]) == float(f"{line[name]:.9g}")
    count, loss = last["privacy/charged_attempts"], last["heldout/loss"]
    assert count == 3 and isinstance(count, int) and loss != loss
    assert as_fp32(0.1) == 0.1 and as_fp32(0.1 + 1e-12) == 0.1


def test_contract_10_an_epsilon_is_never_published_below_what_was_spent(tmp_path: Path) -> None:
    """Neither in the decimal of the line nor in the fp32 of TensorBoard, and above it by two fp32 steps at most."""
    spent = [0.1, 0.100000001, 0.125, 7.9251, *np.random.default_rng(0).uniform(1e-3, 50, 500)]
    writer = PublicMetrics(tmp_path)
    for epsilon in map(float, spent):
        writer.scalars(1, {"privacy/epsilon": Public(epsilon, Reason.CHARGED)})
    writer.close()
    lines = [line["privacy/epsilon"] for line in read_metrics(tmp_path)]
    for epsilon, line in zip(spent, lines, strict=True):
        assert line == as_fp32(line) and epsilon <= min(line, float(np.float32(line)))
        assert line <= epsilon * (1 + 2**-22)
    assert lines[2] == 0.125


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train/loss", Reason.NOISED),
        ("train/batch_size", Reason.SETTINGS),
        ("heldout/train_loss", Reason.DECLARED),
        ("privacy/epsilon", Reason.SETTINGS),
    ],
)
def test_a_name_that_is_not_listed_or_has_another_reason_is_not_published(
    name: str, reason: Reason, tmp_path: Path
) -> None:
    writer = PublicMetrics(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is not published because"):
        writer.scalars(1, {name: Public(0.5, reason)})
    writer.close()
    assert read_metrics(tmp_path) == []


def test_a_setting_that_changes_from_step_to_step_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PUBLISHED, "train/batch_size", Reason.SETTINGS)
    writer = PublicMetrics(tmp_path)
    for step in (1, 2):
        writer.scalars(step, {"train/batch_size": Public(24.0, Reason.SETTINGS)})
    with pytest.raises(ValueError, match="called a setting, and changes"):
        writer.scalars(3, {"train/batch_size": Public(25.0, Reason.SETTINGS)})
    writer.close()


def test_a_box_shows_and_decides_nothing_and_has_no_json_form() -> None:
    box = Private(424242.125)
    assert "424242" not in f"{box} {box!r}" and box.inside() == 424242.125
    with pytest.raises(TypeError):
        json.dumps({"loss": box})
    with pytest.raises(TypeError, match="decides nothing"):
        bool(box)
