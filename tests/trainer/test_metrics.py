import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from privacy.boundary import Private, Public, Reason
from privacy.files.public import read_metrics
from trainer.loop.metrics import PrivateMetrics, PublicMetrics, as_fp32


def private(values: Mapping[str, float]) -> dict[str, Private[float]]:
    return {name: Private(value) for name, value in values.items()}


@pytest.mark.parametrize("torn", ['{"step": 2, "pri', '{"step": 2, "privacy/epsilon": 0.7}', "{"])
def test_a_torn_last_line(tmp_path: Path, torn: str) -> None:
    """A killed process leaves half a line; the next start appends after it and loses nothing of its own."""
    writer = PrivateMetrics(tmp_path)
    writer.scalars(1, private({"privacy/epsilon": 0.5}))
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    writer = PrivateMetrics(tmp_path)
    writer.scalars(3, private({"privacy/epsilon": 0.8}))
    writer.close()
    found = [line["step"] for line in read_metrics(tmp_path)]
    assert found[0] == 1 and found[-1] == 3 and len(found) <= 3


def test_public_events_have_no_clock_and_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            writer.picture(step, "heldout/samples", Public(np.zeros((6, 10, 3), dtype=np.uint8), Reason.DECLARED))
            writer.close()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        events = [
            event for path in files if path.name != "metrics.jsonl" for event in EventFileLoader(str(path)).Load()
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


def test_published_floats_are_rounded_to_fp32(tmp_path: Path) -> None:
    """What is left of a sum's last bits, of which fp64 has many more, says nothing; whole numbers stay whole."""
    rng = np.random.default_rng(0)
    values = [float(x) for x in rng.standard_normal(200) * 10.0 ** rng.integers(-30, 30, 200)]
    writer = PublicMetrics(tmp_path)
    writer.scalars(1, {f"x{n}": Public(value, Reason.NOISED) for n, value in enumerate(values)})
    writer.scalars(2, {"count": Public(3, Reason.CHARGED), "nan": Public(float("nan"), Reason.DECLARED)})
    writer.close()
    first, second = read_metrics(tmp_path)
    for n, value in enumerate(values):
        assert np.float32(first[f"x{n}"]) == np.float32(value)
        assert first[f"x{n}"] == as_fp32(first[f"x{n}"]) == float(f"{first[f'x{n}']:.9g}")
    assert second["count"] == 3 and isinstance(second["count"], int) and second["nan"] != second["nan"]
    assert as_fp32(0.1) == 0.1 and as_fp32(0.1 + 1e-12) == 0.1


def test_a_box_shows_and_decides_nothing_and_has_no_json_form() -> None:
    box = Private(424242.125)
    assert "424242" not in f"{box} {box!r}" and box.inside() == 424242.125
    with pytest.raises(TypeError):
        json.dumps({"loss": box})
    with pytest.raises(TypeError, match="decides nothing"):
        bool(box)
