"""Opens the ledger of a run folder for the run's configuration, data and key."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.index.tar_index import ExampleTable
from privacy.errors import PrivacyConfigError
from privacy.files.durable import require_distinct_files
from privacy.ledger.claim import ParentLedger, keep_copies, parent_states, require_kept
from privacy.ledger.run_state import SharedTerms
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import PrivacyPlan
from privacy.plan.request import PlanRequest
from privacy.run.run_ledger import LedgerOpening, Recorded, open_ledger
from privacy.step.run_folder import RunFolder
from trainer.config.recipe import PrivacySection, RunConfig


def require_places(folder: RunFolder, privacy: PrivacySection) -> None:
    """Refuses a mirror or a shared ledger inside the run folder, and a file with two roles.

    Call it on one rank, before anything is written.

    Raises:
        PrivacyConfigError: a file is inside the folder, or has two roles.
        PrivacyStateRefused: the shared ledger cannot be read.
    """
    roles = dict[str, Path]()
    if privacy.ledger_mirror is not None:
        roles["privacy.ledger_mirror"] = Path(privacy.ledger_mirror)
    if privacy.shared_ledger is not None:
        roles["privacy.shared_ledger"] = Path(privacy.shared_ledger)
        mirror_of_shared = SharedLedger(privacy.shared_ledger).mirror()
        if mirror_of_shared is not None:
            roles["the mirror of privacy.shared_ledger"] = mirror_of_shared
    require_distinct_files(roles, folder.root)


def open_run_ledger(
    config: RunConfig,
    folder: RunFolder,
    table: ExampleTable,
    unit: str,
    parent_ledgers: Sequence[ParentLedger] = (),
) -> LedgerOpening:
    """Opens the ledger of a run folder, or makes the plan of a new one. Collective.

    See `privacy.run.run_ledger.open_ledger`.

    Args:
        unit: names one example, for the ledger and the card.
        parent_ledgers: the ledgers of private runs behind initial weights, on rank 0 alone; empty
            for a run that resumes.
    """
    privacy = config.privacy
    is_disjoint = config.init is not None and config.init.disjoint_data
    limit = privacy.max_examples_per_owner

    def request(recorded: Recorded | None) -> PlanRequest:
        if recorded is None and privacy.target_epsilon is not None:
            print(f"calibrating the noise for epsilon {privacy.target_epsilon:g} ...", flush=True)
        return privacy.request(config.train.num_steps, len(table))

    def describe(recorded: Recorded | None, plan: PrivacyPlan) -> dict[str, Any]:
        fields: dict[str, Any] = {"unit": unit}
        if limit:
            fields["max_examples_per_owner"] = limit
        if recorded is None:
            if parent_ledgers:
                fields["behind"] = keep_copies(folder.root, parent_ledgers)
                if is_disjoint:
                    fields["disjoint_from_start"] = True
            return fields
        # The card computes an owner's epsilon from the recorded limit, and its first number relies
        # on the declaration of disjoint data, so a resume must declare both as they were.
        declarations = {
            "privacy.max_examples_per_owner": (limit, recorded.get("max_examples_per_owner"))
        }
        if "behind" in recorded:
            was_disjoint = recorded.get("disjoint_from_start", False)
            declarations["init.disjoint_data"] = (is_disjoint, was_disjoint)
        for key, (declared, frozen) in declarations.items():
            if declared != frozen:
                raise PrivacyConfigError(
                    f"{key} is {declared}, but {folder.ledger} was opened with {frozen}; it is "
                    "part of the claim: set it back, or start another run folder"
                )
        if parent_ledgers:
            require_kept(folder.root, recorded, parent_ledgers)
        if "behind" in recorded and plan.formal_guarantee:
            # Every claim needs the copies, which are judged before anything is written.
            parent_states(folder.root, recorded)
        return fields

    shared = None
    if privacy.shared_ledger is not None:
        shared = SharedTerms(privacy.shared_ledger, folder.root.name, privacy.fixed_in_advance)
    return open_ledger(
        folder,
        request,
        table.manifest_digest,
        described=describe,
        mirror=privacy.ledger_mirror,
        shared=shared,
    )
