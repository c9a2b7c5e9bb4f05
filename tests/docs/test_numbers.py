"""Tables of measured numbers say what the newest record in benchmarks/results says."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.utility import interval
from tests.docs.pages import ROOT, read


def record(ending: str) -> Any:
    """The newest one; their names begin with the date."""
    found = sorted(path for path in (ROOT / "benchmarks/results").rglob("2*.json") if path.name.endswith(ending))
    return json.loads(found[-1].read_text())


def rows(page: str, first_cell: str) -> dict[str, list[str]]:
    """First cell -> the others, of the table whose head begins with that cell."""
    lines = read(page).splitlines()
    heads = [n for n, line in enumerate(lines) if line.startswith(f"| {first_cell} |")]
    assert len(heads) == 1, (page, first_cell)
    found = {}
    for line in lines[heads[0] + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name.strip("`")] = cells
    return found


WORKLOADS = ("vit_s_16", "dpcap_base")


def results(*words: str) -> list[str]:
    """The two cells behind the one row of the README's results whose first cell has these words."""
    (found,) = [cells for name, cells in rows("README.md", "what").items() if all(word in name for word in words)]
    return found


@pytest.mark.parametrize(("what", "key"), [("time of a clipped", "time_ratio"), ("peak memory", "peak_memory_ratio")])
def test_what_clipping_costs(what: str, key: str) -> None:
    """README.md has book-keeping and Opacus; both models in each cell."""
    measured = {w["workload"]: w for w in record("-step-two-cores.json")["workloads"]}
    ours, ghost, hooks = (
        " and ".join(f"{measured[name][key][mode]:.2f}" for name in WORKLOADS)
        for mode in ("bookkeeping", "opacus_ghost", "opacus_hooks")
    )
    assert results(what) == [ours, f"Opacus: ghost clipping {ghost}, per-example gradients {hooks}"]


LIBRARIES = {
    "this project": "ours", "Opacus 1.6, per-example gradients": "opacus", "Opacus 1.6, ghost clipping": "opacus_ghost",
    "JAX Privacy 2.0": "jax_privacy", "by hand, one example after the other": "by_hand", "without privacy": "non_private",
}  # fmt: skip


def spread(found: Mapping[str, float], digits: int) -> str:
    return f"{found['mean']:.{digits}f} ± {found['half_width']:.{digits}f}"


def test_the_same_network_by_other_libraries() -> None:
    """benchmarks/README.md has every cell of the record, README.md the accuracies and this project's costs over Opacus'."""
    cells = {f"{cell['data']}, epsilon {cell['target_epsilon']:g}": cell for cell in record("-utility.json")["cells"]}
    assert set(cells) == {f"{data}, epsilon {epsilon}" for data in ("digits", "fashion") for epsilon in (3, 8)}
    readme = rows("README.md", "other libraries")
    assert set(readme) == set(cells)
    for name, cell in cells.items():
        table, systems = rows("benchmarks/README.md", name), cell["systems"]
        assert list(table) == list(LIBRARIES)
        for row, system in LIBRARIES.items():
            one = systems[system]
            assert len(one["accuracies"]) == 5, "five seeds"
            private = one["noise_multiplier"] > 0
            assert table[row] == [
                f"{one['noise_multiplier']:.4f}" if private else "",
                f"{one['epsilon_judged']['pld']:.2f}" if private else "",
                spread(one["accuracy"], 3), spread(one["time_ratio"], 2), spread(one["memory_ratio"], 2),
            ], (name, row)  # fmt: skip
            difference = one["accuracy_minus_ours"]
            assert abs(difference["mean"]) <= difference["half_width"] or not private, (
                "both pages: cannot be told apart"
            )
        ours, opacus = systems["ours"], systems["opacus"]
        time, memory = (
            interval([a / b for a, b in zip(ours[of], opacus[of], strict=True)]) for of in ("seconds", "peak_mib")
        )
        less = opacus["accuracy_minus_ours"]
        assert readme[name] == [
            spread(ours["accuracy"], 3), spread(opacus["accuracy"], 3), f"{less['mean']:+.3f} ± {less['half_width']:.3f}",
            spread(systems["jax_privacy"]["accuracy"], 3), spread(systems["non_private"]["accuracy"], 3),
            spread(time, 2), spread(memory, 2),
        ]  # fmt: skip
        assert time["mean"] > 1, "the page says so"


def test_what_opacus_gets_wrong() -> None:
    """README.md names four small models by the record's words."""
    found, page = record("-utility.json")["wirings"], " ".join(read("README.md").split())
    wrong = [found[name]["opacus"].removeprefix("wrong by ").removesuffix(" C") for name in WRONG]
    assert f"a clipped sum that is wrong, by {' and '.join(wrong)} of what one example may contribute" in page
    assert found["LayerNorm without bias"]["opacus"].startswith("refused")
    assert found["a picture that gives an infinite gradient"]["opacus"] == "not finite"
    names = (*WRONG, "LayerNorm without bias", "a picture that gives an infinite gradient")
    assert {found[name]["ours"] for name in names} == {"exact"}


WRONG = ("reflecting padding", "embedding with padding_idx")


ENCODERS = {
    "grey values, no encoder": "pixels", "untrained encoder": "untrained", "synthetic start": "synthetic", "ViP from it": "vip",
    "DP-Cap from it": "dpcap", "DP-Cap from random weights": "dpcap_random", "DP-Cap from it, without privacy": "non_private",
}  # fmt: skip
PROBES = (
    "other clothes, 10 shots",
    "digits, 10 shots",
    "stamps, 10 shots",
    "clip art, 10 shots",
    "clip art, linear probe",
    "mean of all",
)
ORDER = {
    "DP-Cap less ViP": "dpcap > vip", "ViP less synthetic": "vip > synthetic", "DP-Cap less synthetic": "dpcap > synthetic",
    "DP-Cap less untrained": "dpcap > untrained",
}  # fmt: skip


def test_the_order_of_the_papers() -> None:
    """README.md: every arm with its losses, and the paired differences, whatever they say."""
    found, table = record("-ordering.json"), rows("README.md", "encoder")
    assert list(table) == list(ENCODERS) and set(found["seeds"]) == set("01234")
    for row, arm in ENCODERS.items():
        losses = found["heldout_losses"].get(arm)
        said = "" if losses is None else f"{spread(losses['loss'], 3)}; {losses['blind_loss']['mean']:.3f}"
        assert table[row] == [*(spread(found["accuracy"][arm][probe], 3) for probe in PROBES), said], row
    page = " ".join(read("README.md").split())
    for words, claim in ORDER.items():
        one = found["claims"][claim]["mean of all"]
        assert f"{words} {one['mean']:+.3f} ± {one['half_width']:.3f}" in page, words
    verdicts = {words: found["claims"][claim]["mean of all"]["verdict"] for words, claim in ORDER.items()}
    said = {"DP-Cap less ViP": "as the papers", "DP-Cap less untrained": "the other way round"}
    assert verdicts == dict.fromkeys(ORDER, "not told apart") | said, "the page says so"
    together = {arm: probes["mean of all"] for arm, probes in found["accuracy"].items()}
    grey = together.pop("pixels")
    best = max(one["mean"] + one["half_width"] for one in together.values())
    assert grey["mean"] - grey["half_width"] > best, "the page says so"


def test_the_quickstart_beats_what_sees_no_picture() -> None:
    """The README's row is the record of five runs, each of which is below half of the blind loss."""
    found = record("-quickstart.json")
    middle = {name: numbers["median"] for name, numbers in found["summary"].items()}
    ours, compared = results("quickstart")
    assert len(found["runs"]) == 5
    right = f"{middle['captions_right']:.1%}".replace("%", " %")
    assert ours == (
        f"epsilon {middle['epsilon']:.2f} at delta 1e-5; {right} of 1,000 captions exactly right; held-out loss "
        f"{middle['heldout_loss']:.3f} nats per token"
    )
    assert compared == (
        f"without looking {middle['blind_loss']:.3f}; with another picture {middle['shuffled_loss']:.2f}; the most frequent "
        "caption is right for 9.3 %"
    )
    assert all(run["heldout_loss"] <= 0.5 * run["blind_loss"] and run["captions_right"] > 0.5 for run in found["runs"])


def test_the_small_captioner_of_the_readme() -> None:
    models = record("-shapes.json")["models"]
    tests = [("choice: colour", "right colour"), ("choice: shape", "right shape")]
    shares = {
        model: [f"{100 * found['results'][test]['accuracy']:.1f} %" for test, _ in tests]
        for model, found in models.items()
    }
    chance = [f"{100 / models['epsilon 8']['results'][test]['ways']:.1f} %" for test, _ in tests]
    assert results("20,000 synthetic pairs", f"epsilon {models['epsilon 8']['epsilon']:.2f}") == [
        ", ".join(f"{name} {share}" for (_, name), share in zip(tests, shares["epsilon 8"], strict=True)),
        f"guessing {' and '.join(chance)}; best of eight untrained models {' and '.join(shares['untrained'])}; "
        f"without privacy {' and '.join(shares['non-private'])}",
    ]
