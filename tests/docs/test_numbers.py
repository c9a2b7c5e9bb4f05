"""Tables of measured numbers say what the newest record in benchmarks/results says."""

import json
from collections.abc import Mapping
from typing import Any

from evaluation.few_shot import interval
from tests.docs.pages import ROOT, read


def record(ending: str) -> Any:
    """The newest one; their names begin with the date."""
    found = sorted(
        path
        for path in (ROOT / "benchmarks/results").rglob("2*.json")
        if path.name.endswith(ending)
    )
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
    (found,) = [
        cells
        for name, cells in rows("README.md", "what").items()
        if all(word in name for word in words)
    ]
    return found


def test_what_clipping_costs() -> None:
    """README.md has book-keeping and Opacus; both models in each cell."""
    measured = {w["workload"]: w for w in record("-step-two-cores.json")["workloads"]}
    ours, ghost, hooks = (
        " and ".join(f"{measured[name]['time_ratio'][mode]:.2f}" for name in WORKLOADS)
        for mode in ("bookkeeping", "opacus_ghost", "opacus_hooks")
    )
    assert results("time over") == [
        ours,
        f"Opacus: ghost clipping {ghost}, per-example gradients {hooks}",
    ]


LIBRARIES = {
    "this project": "ours",
    "Opacus 1.6, per-example gradients": "opacus",
    "Opacus 1.6, ghost clipping": "opacus_ghost",
    "JAX Privacy 2.0": "jax_privacy",
    "by hand, one example after the other": "by_hand",
    "without privacy": "non_private",
}


def spread(found: Mapping[str, float], digits: int) -> str:
    return f"{found['mean']:.{digits}f} ± {found['half_width']:.{digits}f}"


def test_the_same_network_by_other_libraries() -> None:
    """benchmarks/README.md has accuracy and time of every cell, README.md one accuracy and this project's time over Opacus'."""
    cells = {
        f"{cell['data']}, epsilon {cell['target_epsilon']:g}": cell
        for cell in record("2026-11-23-utility.json")["cells"]
    }
    assert set(cells) == {
        f"{data}, epsilon {epsilon}" for data in ("digits", "fashion") for epsilon in (3, 8)
    }
    times, memories = [], []
    table = rows("benchmarks/README.md", "accuracy; time")
    assert list(table) == list(LIBRARIES)
    for number, name in enumerate(sorted(cells)):
        systems = cells[name]["systems"]
        for row, system in LIBRARIES.items():
            one = systems[system]
            assert len(one["accuracies"]) == 5, "five seeds"
            assert (
                table[row][number]
                == f"{spread(one['accuracy'], 3)}; {one['time_ratio']['mean']:.2f}"
            ), (name, row)
            difference = one["accuracy_minus_ours"]
            told_apart = abs(difference["mean"]) > difference["half_width"]
            assert not told_apart or system == "non_private", "both pages: cannot be told apart"
        ours, opacus = systems["ours"], systems["opacus"]
        time, memory = (
            interval([a / b for a, b in zip(ours[of], opacus[of], strict=True)])
            for of in ("seconds", "peak_mib")
        )
        times, memories = [*times, time["mean"]], [*memories, memory["mean"]]
    one = cells["fashion, epsilon 8"]["systems"]
    ours, opacus, jax = (
        spread(one[name]["accuracy"], 3) for name in ("ours", "opacus", "jax_privacy")
    )
    assert results("same small network") == [ours, f"Opacus {opacus}, JAX Privacy {jax}"]
    assert f"{min(times):.2f} to {max(times):.2f} times Opacus' time" in " ".join(
        read("README.md").split()
    )
    said = f"{min(times):.2f} to {max(times):.2f} times the time of Opacus with per-example gradients and "
    assert f"{said}{min(memories):.2f} to {max(memories):.2f} times its memory" in " ".join(
        read("benchmarks/README.md").split()
    )


def test_what_opacus_gets_wrong() -> None:
    """benchmarks/README.md has the record's words; README.md counts the models on which Opacus is wrong or stops."""
    found = record("2026-11-23-utility.json")["wirings"]
    table = rows("benchmarks/README.md", "small model")
    systems = ("ours", "opacus", "opacus_ghost", "by_hand")
    for name, words in table.items():
        said = [
            found[name][system].partition(":")[0].replace(" by 0", " by 0") for system in systems
        ]
        assert words[:3] == said[:3], (name, words, said)
    bad = [name for name, words in table.items() if words[0] == "exact" and words[1] != "exact"]
    assert len(bad) == 4 and "On four small models Opacus is wrong or stops" in " ".join(
        read("README.md").split()
    )


def test_the_small_world() -> None:
    """README.md's row, and the first table of the record's page."""
    arms = record("-small-world.json")["arms"]
    means = {
        name: {"mean": arm["mean_of_probes"], "half_width": arm["half_width"]}
        for name, arm in arms.items()
    }
    ours, compared = results("small world")
    assert ours == f"DP-Cap at epsilon 8: {spread(means['dpcap'], 3)}"
    controls = {"untrained": "untrained", "HOG": "hog", "HOG with colours": "hog and colours"}
    assert compared == "; ".join(
        f"{words} {spread(means[name], 3)}" for words, name in controls.items()
    )
    table = rows("benchmarks/results/2026-11-27-small-world.md", "features")
    for name, arm in arms.items():
        said = spread(means[name], 3) if arm["half_width"] else f"{arm['mean_of_probes']:.3f}"
        loss = "" if arm["heldout_loss"] is None else f"{arm['heldout_loss']:.3f}"
        assert (table[name][0], table[name][-2], table[name][-1]) == (
            said,
            loss,
            str(len(arm["seeds"])),
        ), name


def test_the_quickstart_beats_what_sees_no_picture() -> None:
    """The README's row is the record of five runs, each of which is below half of the blind loss."""
    found = record("-quickstart.json")
    middle = {name: numbers["median"] for name, numbers in found["summary"].items()}
    ours, compared = results("quickstart")
    assert len(found["runs"]) == 5
    right = f"{middle['captions_right']:.1%}".replace("%", " %")
    assert ours == (
        f"epsilon {middle['epsilon']:.2f} at delta 1e-5; {right} of 1,000 captions exactly right"
    )
    assert compared == "the most frequent caption: 9.3 %"
    assert all(
        run["heldout_loss"] <= 0.5 * run["blind_loss"] and run["captions_right"] > 0.5
        for run in found["runs"]
    )
