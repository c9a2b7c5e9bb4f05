"""Where configuration, data, key and ledger of a run folder meet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.index.tar_index import ExampleTable
from privacy.errors import PrivacyConfigError
from privacy.files.durable import require_apart
from privacy.ledger.claim import ParentLedger, keep_copies, parent_states, require_kept
from privacy.ledger.run_state import SharedTerms
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import PrivacyPlan
from privacy.plan.request import PlanRequest
from privacy.run.ledger import Opening, Recorded, open_ledger
from privacy.step.folder import RunFolder
from trainer.config.recipe import PrivacySection, RunConfig


def require_places(folder: RunFolder, privacy: PrivacySection) -> None:
    """Mirror and shared ledger lie outside of the run folder, and no file has two roles; on one rank, before anything is written.

    Raises:
        PrivacyConfigError: otherwise.
        PrivacyStateRefused: the shared ledger cannot be read.
    """
    named = {
        "privacy.ledger_mirror": privacy.ledger_mirror,
        "privacy.shared_ledger": privacy.shared_ledger,
    }
    roles = {role: Path(name) for role, name in named.items() if name is not None}
    second = None if privacy.shared_ledger is None else SharedLedger(privacy.shared_ledger).mirror()
    require_apart(
        roles if second is None else roles | {"the mirror of privacy.shared_ledger": second},
        folder.root,
    )


def open_run_ledger(
    config: RunConfig,
    folder: RunFolder,
    table: ExampleTable,
    unit: str,
    behind: Sequence[ParentLedger] = (),
) -> Opening:
    """Opens the ledger of a run folder, or makes the plan of a new one; see `privacy.run.ledger.open_ledger`. Collective.

    Args:
        unit: what one example is, for the ledger and the card.
        behind: the ledgers of private runs behind initial weights, on rank 0 alone; none for a run that resumes.
    """
    privacy, disjoint = config.privacy, config.init is not None and config.init.disjoint_data
    limit = privacy.max_examples_per_owner

    def asked(recorded: Recorded | None) -> PlanRequest:
        if recorded is None and privacy.target_epsilon is not None:
            print(f"calibrating the noise for epsilon {privacy.target_epsilon:g} ...", flush=True)
        return privacy.request(config.train.num_steps, len(table))

    def described(recorded: Recorded | None, plan: PrivacyPlan) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "unit": unit,
            **({"max_examples_per_owner": limit} if limit else {}),
        }
        if recorded is None:
            if behind:
                fields["behind"] = keep_copies(folder.root, behind)
                fields |= {"disjoint_from_start": True} if disjoint else {}
            return fields
        # The card computes an owner's epsilon from the recorded limit, and its first number relies on the declaration, so a
        # resume cannot state another one.
        stated = {"privacy.max_examples_per_owner": (limit, recorded.get("max_examples_per_owner"))}
        if "behind" in recorded:
            stated["init.disjoint_data"] = (disjoint, recorded.get("disjoint_from_start", False))
        for key, (now, before) in stated.items():
            if now != before:
                raise PrivacyConfigError(
                    f"{key} is {now}, but {folder.ledger} was opened with {before}; it is part of the claim: set it back, or "
                    "start another run folder"
                )
        if behind:
            require_kept(folder.root, recorded, behind)
        if "behind" in recorded and plan.formal_guarantee:
            # Every claim needs the copies, which are judged before anything is written.
            parent_states(folder.root, recorded)
        return fields

    shared = privacy.shared_ledger
    return open_ledger(
        folder,
        asked,
        table.manifest_digest,
        described=described,
        mirror=privacy.ledger_mirror,
        shared=None
        if shared is None
        else SharedTerms(shared, folder.root.name, privacy.fixed_in_advance),
    )
