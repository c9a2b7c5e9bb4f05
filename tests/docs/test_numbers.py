"""Tables of measured numbers say what the newest record in benchmarks/results says."""

import json
import re
from typing import Any

import pytest

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


WORKLOADS = {"ViT-S/16 classifier": "vit_s_16", "DP-Cap Base captioner": "dpcap_base"}


def test_what_clipping_costs() -> None:
    """README.md: ours with the ratio to accumulating training in brackets, Opacus without."""
    measured = {w["workload"]: w for w in record("-step-two-cores.json")["workloads"]}
    lines = re.findall(r"^\| ([^|]+), (time|peak memory) \| (.*) \|$", read("README.md"), re.M)
    assert len(lines) == 2 * len(WORKLOADS)
    for model, what, cells in lines:
        ratios = measured[WORKLOADS[model]]
        key = "time_ratio" if what == "time" else "peak_memory_ratio"
        expected = [
            f"{ratios[key][mode]:.2f} ({ratios[f'{key}_to_accumulating'][mode]:.2f})"
            for mode in ("bookkeeping", "two_pass")
        ]
        expected += [f"{ratios[key][mode]:.2f}" for mode in ("opacus_ghost", "opacus_hooks")]
        assert cells.split(" | ") == expected, (model, what)


def test_weak_scaling_and_loading() -> None:
    scaling = record("-scaling-two-cores.json")["weak_scaling"]
    measured = [scaling["efficiency"][engine] for engine in ("local", "zero1", "zero3")]
    cells = rows("benchmarks/README.md", "| plain torch | ZeRO-1 | ZeRO-3 | two alone")["weak-scaling efficiency"]
    assert cells == [f"{value:.2f}" for value in (*measured, scaling["efficiency_of_two_alone"])]
    loader = record("-loader-two-cores.json")["one_process"]["poisson_over_sequential"]
    said = " ".join(read("README.md").split())
    assert f"two {min(measured):.2f} to {max(measured):.2f}, the Poisson loader {loader:.2f} times" in said


def test_private_heads() -> None:
    found = record("-private-heads-digits.json")
    table = rows("docs/evaluation.md", "epsilon")
    for method, cells in table.items():
        accuracy = {one["epsilon"]: one["accuracy"] for one in found["accuracy"] if one["method"] == method}
        expected = [accuracy[epsilon] for epsilon in (0.1, 0.5, 1, 2, 5, 10)] + [found["without_noise"][method]]
        assert cells == [f"{value:.2f}" for value in expected], method
    assert set(table) == set(found["without_noise"])


@pytest.mark.parametrize(("column", "model"), [(1, "non-private"), (2, "epsilon 8")])
def test_what_a_small_captioner_sees(column: int, model: str) -> None:
    results = record("-shapes.json")["models"][model]["results"]
    names = {
        "zero-shot, colour and shape": "zero-shot", "zero-shot, colour alone": "zero-shot colour",
        "zero-shot, shape alone": "zero-shot shape", "one colour of two shapes": "choice: colour",
        "one shape of two": "choice: shape", "relation, and who has which colour": "choice: relation",
        "order of three": "choice: order",
    }  # fmt: skip
    table = rows("docs/evaluation.md", "| ways | without privacy | epsilon 7.95")
    assert set(table) == set(names)
    for name, key in names.items():
        assert table[name][0] == str(results[key]["ways"])
        assert abs(float(table[name][column].removesuffix(" %")) - 100 * results[key]["accuracy"]) <= 0.051, name
