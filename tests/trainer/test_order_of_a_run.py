"""The order in which a run writes, charges, draws noise and refuses, and the bits of its weights, are those of the record.

With coins, key and noise fixed, three starts of one run are watched: the first stops after two of four steps; before the second a
crash has torn the ledger's last line and damaged the newest checkpoint; the third finds a finished run. The record is
order_of_a_run.json; `RECORD_ORDER=1` writes it anew. Weights depend on a machine's kernels, so their bits are compared on a
machine like the one that recorded them, and elsewhere the orders alone.

The record was made anew when sums became whole numbers: other roundings, other bits of weights. Its orders differ from those of
the first record, of the program that opened and repeated in two places, by the signature of the ledger alone, which is gone. Two
things were not recorded: the ledger of a new run is made after its last check, and a loop that was killed between its last
checkpoint and its end is ended by the next start.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from privacy.checkpoints.read import Checkpoint, newest_checkpoint
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger import durable
from privacy.loop import PrivateLoop
from privacy.plan import PrivacyPlan
from privacy.step import collectives
from privacy.step import step as one_step
from privacy.step.folder import RunFolder
from tests.distributed.ranks import ROOT, run_ranks
from tests.e2e.repeatable_train import SeededNoise
from tests.privacy.loop.own import Rows, cross_entropy, make, net, rows
from tests.trainer.test_refused_starts import called_public, image, newest_damaged, torn
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import EngineName, load_config
from trainer.ranks.discovery import Ranks, discover_ranks
from trainer.run.start import TrainerStart, train

RECORD = Path(__file__).with_name("order_of_a_run.json")
CALLS = (
    "create_file",
    "write",
    "truncate",
    "fsync",
    "fsync_directory",
    "fsync_path",
    "link",
    "rename",
    "make_one_directory",
)


def machine() -> str:
    """What the bits of a product of matrices depend on."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    kind = re.search(r"model name\s*: (.*)", text)
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {kind[1] if kind else '?'}"


@contextlib.contextmanager
def watched(root: Path) -> Iterator[list[str]]:
    """Notes what is written below `root`, and when sums are reduced and noise is drawn; key, nonces and noise are fixed."""
    events: list[str] = []

    def note(place: Any, what: str) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{place}")) if isinstance(place, int) else Path(place)
        if path.is_relative_to(root):
            name = re.sub(r"\.[0-9a-f]{16}\.tmp", ".TMP", path.relative_to(root).as_posix())
            if events and events[-1].startswith(f"{name}: "):
                events[-1] += f", {what}"
            else:
                events.append(f"{name}: {what}")

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(place: Any, *more: Any) -> Any:
            result = function(place, *more)
            kind = [re.search(rb'"type":"(\w+)"', more[0])] if function.__name__ == "write" else []
            target = [more[0].name] if function.__name__ in ("rename", "link") else []
            note(place, " ".join([function.__name__, *target, *(found[1].decode() for found in kind if found)]))
            return result

        return call

    class Noise(SeededNoise):
        def __init__(self) -> None:
            self._generator = torch.Generator().manual_seed(collectives.rank())

        def standard_normal(self, count: int, device: torch.device) -> Tensor:
            if events[-1] != "noise":
                events.append("noise")
            return super().standard_normal(count, device)

    reduce = one_step.reduce_to_owners

    def reduced(*arguments: Any) -> Any:
        events.append("reduction")
        return reduce(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(durable, name, noting(getattr(durable, name)))
        patch.setattr("privacy.step.folder.make_directory", durable.make_directory)
        patch.setattr("secrets.token_bytes", lambda size=32: bytes(range(size)))
        patch.setattr(one_step, "reduce_to_owners", reduced)
        patch.setattr(PrivacyPlan, "noise", lambda _: Noise())
        patch.setattr("privacy.run.ledger.RunLedger.claim", lambda *_: (1.0, 1e-5))
        patch.setattr(PrivacyPlan, "epsilon_after", lambda *_: 1.0)
        patch.setattr(fcntl, "flock", lambda *_: None)  # held until the process ends, and this one resumes
        # One nonce for all sessions, which a ledger refuses: here coins have to be known, and nothing is claimed.
        nonces = iter(bytes([number]) * 16 for number in range(1, 99))
        patch.setattr("privacy.ledger.ledger.secrets.token_bytes", lambda size=32: (next(nonces) * 2)[:size])
        yield events


def bits(run: Path) -> str:
    """A hash of the weights in the newest checkpoint."""
    path = newest_checkpoint(run / "checkpoints")
    assert path is not None
    found, digest = Checkpoint(path), hashlib.sha256()
    for name in sorted(found.shapes):
        digest.update(found.full("param", name).numpy().tobytes())
    return f"{path.name} {digest.hexdigest()}"


def crashed(run: Path) -> None:
    torn(run)
    newest_damaged(run)


def of_trainer(device: torch.device, folder: Path, engine: EngineName, ds_config: str, ranks: Ranks) -> dict[str, Any]:
    """Three starts of the trainer on this rank."""
    run, settings = folder / "run", load_machine_settings(ROOT / "ds_configs" / ds_config)
    codes, orders, weights = [], [], []
    for stops_after in (2, 9, 9):
        with watched(run) as events, pytest.MonkeyPatch.context() as patch:
            steps: list[int] = []
            pending = "trainer.loop.stopping.StopRequests.pending"
            patch.setattr(pending, lambda self, steps=steps, last=stops_after: steps.append(1) or len(steps) > last)
            codes.append(train(config(), settings, engine, run, ROOT, ranks, device, PrivacyPlan.noise(None)))  # type: ignore[arg-type]
        orders.append(list(events))
        weights.append(bits(run))
        dist.barrier()  # all have read
        if ranks.is_main and stops_after == 2:
            crashed(run)
        dist.barrier()
    return {"codes": codes, "orders": orders, "weights": weights}


def config(*changes: str) -> Any:
    small = [
        "heldout.num_examples=2",
        "heldout.num_captions=0",
        "privacy.clipping_mode=bookkeeping",
        "train.sanity_checks=true",
    ]
    return load_config(ROOT / "recipes/tiny.toml", [*small, *changes])


def of_own_loop(folder: Path, **changes: Any) -> dict[str, Any]:
    """The same of a loop of one's own."""
    run, orders, weights = folder / "own", [], []
    for steps in (2, 9, 9):
        with watched(run) as events, own_loop(run, **changes) as loop:
            for _ in zip(range(steps), loop, strict=False):
                pass
        orders.append(list(events))
        weights.append(bits(run))
        if steps == 2:
            crashed(run)
    return {"orders": orders, "weights": weights}


def own_loop(run: Path, model: nn.Module | None = None, **changes: Any) -> PrivateLoop:
    return make(run, model, **({"num_steps": 4, "save_every": 1} | changes))


def on_rank(device: torch.device, folder: str, engine: EngineName, ds_config: str) -> dict[str, Any]:
    return of_trainer(device, Path(folder), engine, ds_config, discover_ranks(os.environ))


def require_recorded(name: str, found: Any) -> None:
    """Compares with the record, or writes it."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if os.environ.get("RECORD_ORDER"):
        RECORD.write_text(json.dumps(record | {"machine": machine(), name: found}, indent=1) + "\n")
        return
    expected = record[name]
    if record["machine"] != machine():
        for one in (expected, found):
            for rank in one if isinstance(one, list) else [one]:
                if isinstance(rank, dict):  # not a line of refusals
                    rank.pop("weights", None)
    assert found == expected


def test_of_the_trainer_in_one_process(tmp_path: Path, one_rank: torch.device) -> None:
    require_recorded("local", of_trainer(one_rank, tmp_path, "local", "zero1.json", Ranks()))


@pytest.mark.full
@pytest.mark.parametrize(("engine", "ds_config"), [("deepspeed", "zero3.json"), ("fsdp", "zero3.json")])
def test_of_the_trainer_on_two_ranks(engine: str, ds_config: str, tmp_path: Path) -> None:
    found = run_ranks(f"{__name__}:on_rank", 2, folder=str(tmp_path), engine=engine, ds_config=ds_config)
    require_recorded(engine, found)


def test_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    require_recorded("own loop", of_own_loop(tmp_path))


# In the order in which a start refuses them: overrides, or what is done to the folder.


def a_folder_of_metrics(run: Path) -> None:
    (run / "metrics.jsonl").unlink(missing_ok=True)
    (run / "metrics.jsonl").mkdir()


def no_key(run: Path) -> None:
    (run / "private/sampling.key").unlink()


FAULTS: list[Callable[[Path], object] | str] = [
    "privacy.ledger_mirror={run}/mirror.jsonl",
    a_folder_of_metrics,
    no_key,
    "data.shards=nowhere/*.tar",
    "heldout.shards=data/demo/train-*.tar heldout.is_public=true",
    "data.num_examples=7",
    "data.caption_field=nothing",
    "privacy.noise_multiplier=9",
    called_public,
    "model.overrides.decoder_width=48",
    "optimizer.name=sgd",
]  # fmt: skip


def refusals(stopped: Path, faults: list[Any], start: Callable[[Path, list[Any]], object]) -> list[str]:
    """What a start says of all faults, then of all but the first, and so on; each refusal leaves the folder as it was."""
    said = []
    for first in range(len(faults)):
        run = stopped.with_name(f"refused-{first}")
        shutil.copytree(stopped, run)
        for fault in faults[first:]:
            if callable(fault):
                fault(run)
        before = image(run)
        try:
            start(run, faults[first:])
        except Exception as error:  # whatever is said
            said.append(f"{type(error).__name__}: {str(error).replace(str(run), 'RUN').replace(str(ROOT), '')[:90]}")
            assert image(run) == before, said[-1]
        else:
            said.append("none")
        shutil.rmtree(run)
    return said


def test_the_order_in_which_the_trainer_refuses(tmp_path: Path, one_rank: torch.device) -> None:
    run, settings = tmp_path / "run", load_machine_settings(ROOT / "ds_configs/zero1.json")

    def start(folder: Path, faults: list[Any]) -> object:
        changes = [word.format(run=folder) for fault in faults if isinstance(fault, str) for word in fault.split()]
        with watched(folder):
            return train(config(*changes), settings, "local", folder, ROOT, Ranks(), one_rank)

    with pytest.MonkeyPatch.context() as patch:
        steps: list[int] = []
        patch.setattr("trainer.loop.stopping.StopRequests.pending", lambda self: steps.append(1) or len(steps) > 1)
        start(run, [])
        require_recorded("refusals of the trainer", refusals(run, FAULTS, start))


class Own(nn.Sequential):
    """Another class than the run's."""


def with_batch_norm(model: nn.Module) -> nn.Module:
    return nn.Sequential(*model, nn.BatchNorm1d(3))


def mixing(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x, y: cross_entropy(model)(x - x.mean(0), y)


OWN_FAULTS: list[Any] = [
    "ledger_mirror", a_folder_of_metrics, no_key, "lacking", "batch_norm", "mixing", "unusable", "noise", called_public, "class",
    "adam",
]  # fmt: skip


def test_the_order_in_which_a_loop_refuses(tmp_path: Path) -> None:
    def start(folder: Path, faults: list[Any]) -> object:
        model = net()
        model = Own(*model) if "class" in faults else model
        model = with_batch_norm(model) if "batch_norm" in faults else model
        changes: dict[str, Any] = {"loss": mixing(model) if "mixing" in faults else cross_entropy(model)}
        kind = torch.optim.Adam if "adam" in faults else torch.optim.SGD
        changes["optimizer"] = kind(list(model.parameters())["lacking" in faults :], lr=0.5)
        changes |= {"noise_multiplier": 9.0} if "noise" in faults else {}
        changes |= {"ledger_mirror": folder / "mirror.jsonl"} if "ledger_mirror" in faults else {}
        changes |= {"dataset": Rows([(x[:2], y) for x, y in rows()])} if "unusable" in faults else {}
        with watched(folder), own_loop(folder, model, **changes) as loop:
            return next(iter(loop), None)

    start(tmp_path / "run", [])
    require_recorded("refusals of a loop", refusals(tmp_path / "run", OWN_FAULTS, start))


def test_the_checks_alone_write_nothing(
    tmp_path: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was trained in, not a byte; of a new one, a folder. One that is refused at last has no ledger either."""
    settings, run, new = load_machine_settings(ROOT / "ds_configs/zero1.json"), tmp_path / "run", tmp_path / "new"

    def starting(folder: Path) -> TrainerStart:
        arguments = (config(), settings, "local", RunFolder(folder), ROOT, Ranks(), one_rank, None)
        return TrainerStart(*arguments, may_restart=False)  # type: ignore[arg-type]

    with watched(run):
        monkeypatch.setattr("trainer.loop.stopping.StopRequests.pending", lambda self: True)
        assert train(config(), settings, "local", run, ROOT, Ranks(), one_rank) == 7
        before = image(run)
        for check in starting(run).checks():
            check()
            assert check.__doc__, "a check says why it is there"
        assert image(run) == before
        for check in starting(new).checks():
            check()

        def refuse(*_: Any) -> None:
            raise PrivacyConfigError("refused at last")

        monkeypatch.setattr("trainer.run.start.require_neighbours_apart", refuse)
        with pytest.raises(PrivacyConfigError, match="refused at last"):
            train(config(f"privacy.ledger_mirror={tmp_path}/mirror"), settings, "local", new, ROOT, Ranks(), one_rank)
    assert not (new / "ledger.jsonl").exists() and not (tmp_path / "mirror").exists()
    assert not list((new / "private").glob("*.key*"))


def test_a_loop_that_was_killed_before_its_end_is_ended_by_the_next_start(tmp_path: Path) -> None:
    run, closes = tmp_path / "run", "privacy.run.ledger.RunLedger.close_run"
    with watched(run), pytest.MonkeyPatch.context() as patch:
        patch.setattr(closes, lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt), own_loop(run) as loop:
            for _ in loop:
                pass
    with watched(run), own_loop(run) as loop:
        assert loop.steps_done == 4 and b'"type":"close"' in (run / "ledger.jsonl").read_bytes()


def test_a_new_run_beside_a_checkpoint_that_was_set_aside_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with watched(run), own_loop(run) as loop:
        loop.step()
    for path in (run / "checkpoints").glob("step-*"):
        path.rename(path.with_name(f"set-aside-{path.name}"))
    (run / "ledger.jsonl").unlink()
    shutil.rmtree(run / "private")
    with watched(run), pytest.raises(PrivacyStateRefused, match=r"is gone, and a checkpoint of step 1 remembers it"):
        own_loop(run)
    assert not (run / "ledger.jsonl").exists()
