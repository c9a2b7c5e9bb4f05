"""Plants one mistake after the other in a copy of the committed tree and says which test finds it. Prints JSON.

    python -m tests.planted [--only 3 7] [--root OTHER_CHECKOUT]

Each mistake is one that a tired engineer could make and a reader could overlook, one in each corner of the rooms. The tests named
beside it run first, as in `make test`, then all others. A mistake that nothing finds is a hole in the tests; one whose text is
no longer in the code has to be planted anew by hand, so that the list keeps its length.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Mistake(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: str


MISTAKES = [
    Mistake(
        "the sums of the halves of a checked micro-batch are not compared",
        "privacy/guards/isolation.py",
        "return self.rows_are_close and self.distance <= 1",
        "return self.rows_are_close",
        "tests/privacy/test_isolation.py",
    ),
    Mistake(
        "the examples of a rank's second half are never left out",
        "privacy/guards/isolation.py",
        "for is_kept_B in (is_in_first_B, ~is_in_first_B):",
        "for is_kept_B in (is_in_first_B, is_in_first_B):",
        "tests/privacy/test_isolation.py",
    ),
    Mistake(
        "a layer that is used twice counts the product of its two gradients once",
        "privacy/clipping/norms.py",
        "squared_B + 2 * inner(x, y)",
        "squared_B + inner(x, y)",
        "tests/privacy/clipping",
    ),
    Mistake(
        "padding tokens of an embedding move the sum",
        "privacy/gradients/rules.py",
        "if module.padding_idx is not None:\n        g_BTp",
        "if module.padding_idx is None:\n        g_BTp",
        "tests/privacy/clipping",
    ),
    Mistake(
        "what is not finite of an example is multiplied by zero, not zeroed",
        "privacy/clipping/clipped_sum.py",
        "blank_B=~factors.is_finite_B if needs_blanking(factors.is_finite_B) else None",
        "blank_B=None",
        "tests/privacy/clipping",
    ),
    Mistake(
        "the cap keeps the largest coins",
        "privacy/sampling/poisson.py",
        "np.lexsort((ids, values))[:cap]",
        "np.lexsort((ids, values))[-cap:]",
        "tests/privacy",
    ),
    Mistake(
        "an example is augmented alike in every step",
        "privacy/sampling/poisson.py",
        "blocks[:, 0] = step",
        "blocks[:, 0] = 0",
        "tests/privacy tests/data",
    ),
    Mistake(
        "the intent is written after the reduction",
        "privacy/step/step.py",
        "    if not clipped.leaves_process:\n"
        "        lr = _intend(charge, step, release)\n"
        '    laps.end("intent")\n'
        "\n"
        "    shards = reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout)\n",
        '    laps.end("intent")\n'
        "    shards = reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout)\n"
        "    if not clipped.leaves_process:\n"
        "        lr = _intend(charge, step, release)\n",
        "tests/trainer/test_audit_mechanism.py",
    ),
    Mistake(
        "noise repeats from one draw to the next",
        "privacy/noise/source.py",
        "Cipher(algorithms.AES256(os.urandom(32)), modes",
        "Cipher(algorithms.AES256(b'k' * 32), modes",
        "tests/privacy/test_noise.py",
    ),
    Mistake(
        "the slack of the sensitivity is not charged",
        "privacy/accounting/accountants.py",
        "return noise_multiplier / (1 + sensitivity_slack)",
        "return noise_multiplier",
        "tests/privacy/test_plan.py",
    ),
    Mistake(
        "a group of people is charged as if its records never met in a batch",
        "privacy/accounting/accountants.py",
        "shifts = [float(hits) for hits in range(k + 1)]",
        "shifts = [float(hits > 0) for hits in range(k + 1)]",
        "tests/privacy/test_accounting.py",
    ),
    Mistake(
        "a ledger line is not flushed to the disk",
        "privacy/ledger/chain.py",
        "durable.write(self._descriptor, data)\n            durable.fsync(self._descriptor)",
        "durable.write(self._descriptor, data)",
        "tests/crashes",
    ),
    Mistake(
        "a torn line is never charged",
        "privacy/ledger/records.py",
        "return is_between_steps and has_steps and has_budget and self.closed is None",
        "return False",
        "tests/privacy/test_ledger_damage.py",
    ),
    Mistake(
        "a resume takes any checkpoint that lies there",
        "privacy/run/run.py",
        "    ledger.on_main(lambda on_rank_0: require_recorded(checkpoint.path, on_rank_0.state))\n",
        "",
        "tests/trainer/test_import_provenance.py",
    ),
    Mistake(
        "the reduction over ranks leaves out the last one",
        "privacy/ranks/collectives.py",
        "for row in received[1:]:",
        "for row in received[1:-1] if len(received) > 2 else received[1:]:",
        "tests/distributed/test_accumulation.py",
    ),
    Mistake(
        "the verifier believes the stated deviation of the noise",
        "privacy/verify.py",
        "math.isclose(std, std_planned, rel_tol=1e-9)",
        "math.isclose(std, std_planned, rel_tol=1e-1)",
        "tests/privacy/verify/test_every_field.py",
    ),
    Mistake(
        "the training loss is published",
        "trainer/loop/reporting.py",
        "self._public.scalars(step, public)\n",
        'loss = Public(private["train/loss"].inside(), Reason.NOISED)\n'
        '            self._public.scalars(step, public | {"train/loss": loss})\n',
        "tests/trainer/test_non_interference.py",
    ),
    Mistake(
        "DeepSpeed clips the noised gradient",
        "trainer/config/machine.py",
        '"gradient_clipping": 0.0,\n        "prescale',
        '"gradient_clipping": 1.0,\n        "prescale',
        "tests/trainer/test_ds_config.py",
    ),
    Mistake(
        "bytes that cannot be read count as an undecodable example",
        "data/reading/reader.py",
        'raise ReadError(\n                    f"{location} does not fit its index ({error}); index again"'
        "\n                ) from error",
        "yield RawExample(None, {})",
        "tests/data/test_index.py",
    ),
    Mistake(
        "an autoencoder is judged by the patches that it sees",
        "models/masked_autoencoder.py",
        "error_BP.masked_fill(~mask_BP, 0)",
        "error_BP.masked_fill(mask_BP, 0)",
        "tests/models/test_masked_autoencoder.py",
    ),
    Mistake(
        "the last step of a cosine does not move",
        "trainer/optimizers/__init__.py",
        "(end + 1 - warmup), 1.0)",
        "(end - warmup), 1.0)",
        "tests/trainer/test_optimizers.py",
    ),
    Mistake(
        "zero-shot classification divides a caption's log-probability by the longest caption",
        "evaluation/zero_shot.py",
        "(log_probs_NC / lengths_C).unflatten",
        "(log_probs_NC / lengths_C.max()).unflatten",
        "tests/evaluation/test_zero_shot.py",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Plants mistakes and prints as JSON which test finds each."
    )
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="N", help="numbers from 1 on; all by default"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parents[1],
        help="a checkout; this one by default",
    )
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(
            ["git", "clone", "--quiet", "--shared", str(options.root), str(copy)], check=True
        )
        for number, mistake in enumerate(MISTAKES, 1):
            if options.only and number not in options.only:
                continue
            print(f"{number:2}. {mistake.what}", file=sys.stderr, flush=True)
            path = copy / mistake.file
            text = path.read_text()
            if text.count(mistake.old) != 1:
                found[str(number)] = {
                    "what": mistake.what,
                    "found_by": "its text is not in the code",
                }
                continue
            path.write_text(text.replace(mistake.old, mistake.new))
            found_by = first_failure(copy, mistake.tests.split()) or first_failure(copy, ["tests"])
            found[str(number)] = {
                "what": mistake.what,
                "file": mistake.file,
                "found_by": found_by or "nothing",
            }
            print(f"    {found_by or 'nothing'}", file=sys.stderr, flush=True)
            path.write_text(text)
    print(json.dumps(found, indent=1))


def first_failure(copy: Path, tests: list[str]) -> str | None:
    """The test of `make test` that fails first in these folders, or None."""
    command = [
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not full and not gpu and not cluster",
        *tests,
    ]
    done = subprocess.run([sys.executable, *command], cwd=copy, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        sys.exit(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1] if failed else None


if __name__ == "__main__":
    main()
