"""A privacy card that holds everything that a card can hold, with one text in every place that takes any."""

from privacy.card.model import (
    Accounting,
    AdaptiveBound,
    Attack,
    Attempts,
    AuditResult,
    CarriedRun,
    Checkpoint,
    Composition,
    DataSet,
    Head,
    HeldoutLoss,
    LedgerFile,
    Mechanism,
    PrivacyCard,
    Provenance,
    PublicData,
    Release,
    Released,
    Samples,
    Sampling,
    Session,
    Stated,
    Tuning,
    UnitOfPrivacy,
    Utility,
)


def full_card(
    text: str, *, with_head: bool = False, statement: str = "A statement.", key: str = "option"
) -> PrivacyCard:
    """
    Args:
        text: every name, path and word from a file.
        statement: every statement.
        key: every name of a value whose names are free.
    """
    stated = Stated(text=text, file=text)
    head = Head(method=text, num_classes=3, covers=text, **{key: text})
    adaptive = AdaptiveBound(smallest_bound=0.5, largest_bound=1.5, last_bound=0.75)
    sibling = {"name": text, "time_utc": text, "is_this_run": True, "chosen_after_outputs": False, "epsilon": 0.5}
    summary = {
        "epsilon": 5.0, "delta": 1e-4, "unit": text, "accounting": text, "epsilon_reserved": 1.5, "runs": [sibling],
        "informal_runs": [{"name": text, "reason": text}],
    }  # fmt: skip
    return PrivacyCard(
        run_name=text,
        formal_guarantee=True,
        reasons=(),
        epsilon=1.25,
        delta=1e-5,
        steps_done=3,
        steps_planned=6,
        attempts_charged=4,
        warnings=(statement,),
        not_stated=(text,),
        released=Released(
            statement=statement,
            checkpoints_recorded=2,
            last_checkpoint=Checkpoint(step=3, name=text, manifest_sha256=text, manifest_matches=True),
            post_processing=(Stated(text=statement, file=text),),
        ),
        unit_of_privacy=UnitOfPrivacy(
            unit=text, num_examples=2000, deduplication=stated,
            data_set=DataSet(name=stated, owner=stated),
        ),
        plan={"max_grad_norm": 1.0, "noise_multiplier": 4.0, "sensitivity_slack": 1e-3, "sample_rate": 0.05,
              "expected_batch_size": 100, "cap": 180, "clipping_function": text},
        mechanism=Mechanism(
            name=text, head=head if with_head else None, adaptive_clipping=adaptive, noise_multiplier_accounted=3.9,
            statement=statement, settings=((text, text),),
            releases=(Release(name=text, count=4, smallest_noise_multiplier=4.0, largest_sensitivity=1.5),),
        ),
        sampling=Sampling(
            scheme=text, turns_charged=4,
            key_commitment_sha256=text, data_hmac_sha256=text, statement=statement,
        ),
        accounting=Accounting(
            epsilon=1.25, delta=1e-5, accountant_at_opening=text, accountant=text,
            accountant_python=text, statement=statement, value_interval=1e-4, noise_tail_delta=1e-15, epsilon_target=2.0,
            epsilon_planned=1.5, epsilon_with_reserve=1.75, epsilon_rdp=1.5, epsilon_prv=(1.2, 1.3), prv_accountant=text,
            epsilon_replace_one=1.4, epsilon_group={"2": 2.5, "5": 6.5}, max_examples_per_owner=2, epsilon_owner=2.5,
            attack=Attack(advantage=0.1, true_positive={"0.01": 0.02}),
            attempts=Attempts(charged=4, allowed=10, done=3, repeats=1, torn_lines=1, torn_lines_charged=1),
        ),
        composition=Composition(
            epsilon=1.25, delta=1e-5, disjoint_by_declaration=True, statement=statement,
            runs=(
                CarriedRun(name=text, file=text, epsilon=1.0, delta=1e-5, attempts_charged=4, disjoint_from_those_before=True),
                CarriedRun(name=text, file=text, epsilon=1.25, delta=1e-4, attempts_charged=4, disjoint_from_those_before=False),
            ),
        ),
        tuning=Tuning(stated=stated, shared_ledger=text, shared_summary=summary),
        public_data=PublicData(statement=statement, file=text, attested=True, facts={key: text, "start": {key: text}}),
        provenance=Provenance(
            commit=text,
            opened_utc=text,
            closed=text,
            ledger=LedgerFile(format=1, lines=9, last_line_sha256=text, mirrored_sessions=1),
            sessions=(Session(mirror=True, commit="c0ffee", modified=True, python=text, packages={key: text}),),
        ),
        audits=(
            AuditResult(
                file=text, kind=text, verdict=text, date_utc=text, of_this_ledger=False, violated_checks=(text, text)
            ),
        ),
        utility=Utility(
            heldout_file=text,
            heldout_loss=(HeldoutLoss(step=3, loss=6.5, blind_loss=5.75, shuffled_loss=7.25),),
            samples=Samples(file=text, step=3),
        ),
    )  # fmt: skip
