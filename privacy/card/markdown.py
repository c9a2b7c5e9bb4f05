"""Renders a privacy card as one Markdown page. Epsilons are rounded up, so that no printed number understates."""

from __future__ import annotations

from collections.abc import Sequence

from privacy.card.markdown_others import audit, public_data, tuning, utility
from privacy.card.text import (
    Card,
    bullets,
    cell,
    code,
    epsilon_text,
    facts,
    rounded_down,
    rounded_up,
    stated_text,
    table_of,
)


def to_markdown(card: Card) -> str:
    """The page for `card` (`privacy.card.report.privacy_card`, with or without the parts that other files add)."""
    title = card.get("run_name")
    parts = [f"# Privacy card{f' of {cell(title)}' if title else ''}", _headline(card), _warnings(card)]
    for number, (heading, render) in enumerate(_SECTIONS, start=1):
        parts.append(f"## {number}. {heading}\n\n{render(card)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(card: Card) -> str:
    steps = "unknown" if card["steps_done"] is None else f"{card['steps_done']:,}"
    progress = f"{steps} of {card['steps_planned']:,} steps done, {card['attempts_charged']:,} attempts charged."
    if not card["formal_guarantee"]:
        reasons = bullets(cell(reason) for reason in card["reasons"])
        return f"> **No formal guarantee. No epsilon is claimed.** {progress}\n\nReasons:\n\n{reasons}"
    epsilon = "no finite epsilon" if card["epsilon"] is None else f"epsilon = {rounded_up(card['epsilon'])}"
    unit, n = card["unit_of_privacy"]["unit"], card["unit_of_privacy"]["num_examples"]
    return (
        f"> **({epsilon}, delta = {card['delta']:.6g})-differential privacy** for {unit} out of {n:,}, "
        f"zero-out adjacency.\n> {progress} Formal guarantee: yes.\n\n"
        "Every number of sections 1 to 8 and 12 is computed from `ledger.jsonl` alone; where another file is used, "
        "it is named. Epsilons are rounded up."
    )


def _warnings(card: Card) -> str:
    return "**To note:**\n\n" + bullets(cell(line) for line in card["warnings"]) if card["warnings"] else ""


def _setting(card: Card) -> str:
    return f"Setting: {card['setting']['model']}. {card['setting']['statement']}"


def _released(card: Card) -> str:
    released = card["released"]
    last = released["last_checkpoint"]
    rows = [("checkpoints in the ledger", f"{released['checkpoints_recorded']:,}")]
    if last is not None:
        rows.append(("last one", f"{code(last['name'])}, step {last['step']:,}"))
        rows.append(("SHA-256 of its manifest", f"{code(last['manifest_sha256'])}{_match(last)}"))
    also = "".join(
        f"\n\n{cell(p['statement'])} (`{p['file']}`, not attested)" for p in released.get("post_processing", ())
    )
    return f"{released['statement']}\n\n{facts(rows)}{also}"


def _match(last: Card) -> str:
    if "manifest_matches" not in last:
        return ""
    return " (the file in the run folder matches)" if last["manifest_matches"] else " (**the file there differs**)"


def _unit(card: Card) -> str:
    unit = card["unit_of_privacy"]
    duplicates = stated_text(unit["deduplication"], "not stated by the recipe")
    return (
        f"**{unit['unit'].capitalize()}**; n = {unit['num_examples']:,}. {unit['statement']}\n\n"
        f"Removal of near-duplicates: {duplicates}."
    )


def _adjacency(card: Card) -> str:
    statement: str = card["adjacency"]["statement"]
    return statement


def _mechanism(card: Card) -> str:
    mechanism = card["mechanism"]
    rows = [
        ("noise multiplier sigma", f"{mechanism['noise_multiplier']:.6g}"),
        ("slack r of the sensitivity", f"{mechanism['sensitivity_slack']:g}"),
        ("sigma / (1 + r), as accounted", f"{mechanism['noise_multiplier_accounted']:.6g}"),
        ("noise source", cell(mechanism["noise_source"])),
    ]
    if mechanism["head"] is None:
        rows.insert(0, ("clipping bound C", _bound(mechanism)))
        rows.append(("divisor (expected batch size B)", f"{mechanism['expected_batch_size']:,}"))
    else:
        options = {name: value for name, value in mechanism["head"].items() if name not in ("method", "covers")}
        rows += [(f"option {cell(name)}", cell(str(value))) for name, value in options.items()]
    rows += [(f"released: {cell(item['name'])}", _release(item)) for item in mechanism["releases"]]
    return f"{mechanism['name']}. {mechanism['statement']}\n\n{facts(rows)}"


def _bound(mechanism: Card) -> str:
    adaptive = mechanism.get("adaptive_clipping")
    if adaptive is None:
        return f"{mechanism['max_grad_norm']:g}"
    moved = f"now {adaptive['last_bound']:.4g}" if adaptive["last_bound"] is not None else "no step yet"
    return (
        f"adaptive: from {mechanism['max_grad_norm']:g}, {moved}; quantile {adaptive['target_unclipped_quantile']:g}, "
        f"learning rate {adaptive['clipbound_learning_rate']:g}, noise {adaptive['unclipped_num_std']:g} on the count"
    )


def _release(item: Card) -> str:
    least, most = item["smallest_noise_multiplier"], item["largest_sensitivity"]
    return f"{item['count']:,} times; standard deviation / sensitivity >= {least:.6g}; sensitivity <= {most:.6g}"


def _sampling(card: Card) -> str:
    sampling = card["sampling"]
    cap = "none" if sampling["cap"] is None else f"{sampling['cap']:,} examples"
    rows = [
        ("scheme", cell(sampling["scheme"])),
        ("is what the accountant assumes", "yes" if sampling["matches_accounting"] else "**no**"),
        ("sample rate q", f"{sampling['sample_rate']:.6g}"),
        ("expected batch size B = q n", f"{sampling['expected_batch_size']:,}"),
        ("cap of a batch", cap),
        ("commitment to the sampling key (SHA-256)", code(sampling["key_commitment_sha256"])),
        ("identity of the data (HMAC-SHA256 under that key)", code(sampling["data_hmac_sha256"])),
    ]
    return f"{sampling['statement']}\n\n{facts(rows)}"


def _accounting(card: Card) -> str:
    numbers = card["accounting"]
    attempts = _attempts(card, numbers["attempts"])
    if not card["formal_guarantee"]:
        return f"{numbers['statement']}\n\n{attempts}"
    parts = [
        numbers["statement"],
        _claims(card, numbers),
        attempts,
        _others(numbers),
        _by_delta(numbers),
        _attack(numbers),
    ]
    return "\n\n".join(part for part in parts if part)


def _claims(card: Card, numbers: Card) -> str:
    attempts, delta = numbers["attempts"], numbers["delta"]
    rows = [
        (f"**the claim: {attempts['charged']:,} attempts charged**", f"**{epsilon_text(numbers['epsilon'])}**"),
        (f"planned, {card['steps_planned']:,} steps without a crash", epsilon_text(numbers["epsilon_planned"])),
        (f"with the whole reserve, {attempts['allowed']:,} attempts", epsilon_text(numbers["epsilon_with_reserve"])),
    ]
    if numbers["epsilon_target"] is not None:
        rows.append(("target that sigma was calibrated to", f"{numbers['epsilon_target']:g}"))
    if numbers["epsilon_prv"] is not None:
        lower, upper = numbers["epsilon_prv"]
        rows.append(("cross-check: PRV bracket, without the cap", f"{rounded_down(lower)} to {rounded_up(upper)}"))
    rows.append(("cross-check: RDP upper bound, without the cap", epsilon_text(numbers["epsilon_rdp"])))
    used = [numbers["accountant"], numbers["prv_accountant"], f"Python {numbers['accountant_python']}"]
    return (
        f"{table_of((f'at delta = {delta:.6g}', 'epsilon'), rows)}\n\n{_delta_sentence(card, numbers)}\n"
        f"This card was computed with {', '.join(cell(name) for name in used if name)}; the run was planned with "
        f"{cell(numbers['accountant_at_opening'] or 'an unknown accountant')}."
    )


def _delta_sentence(card: Card, numbers: Card) -> str:
    n, product = card["unit_of_privacy"]["num_examples"], numbers["delta_times_n"]
    relation = "at most" if product <= 1 else "**above**"
    return f"delta is {relation} 1/n: 1/n = {1 / n:.4g}, delta times n = {product:.4g}."


def _attempts(card: Card, attempts: Card) -> str:
    steps = "unknown" if card["steps_done"] is None else f"{card['steps_done']:,}"
    rows = [
        ("highest step done, of planned", f"{steps} of {card['steps_planned']:,}"),
        ("attempts charged, of allowed", f"{attempts['charged']:,} of {attempts['allowed']:,}"),
        ("attempts whose update was applied", f"{attempts['done']:,}"),
        ("repeats of a step", f"{attempts['repeats']:,}"),
        ("torn lines (of them charged)", f"{attempts['torn_lines']:,} ({attempts['torn_lines_charged']:,})"),
    ]
    return facts(rows)


def _others(numbers: Card) -> str:
    rows = [("one example exchanged for an arbitrary other one (replace-one)", numbers["epsilon_replace_one"])]
    rows += [(f"{size} examples of one person, or copies", value) for size, value in numbers["epsilon_group"].items()]
    rows.append(
        (
            f"one owner of at most {numbers['max_examples_per_owner']} examples, as the recipe states",
            numbers["epsilon_owner"],
        )
    )
    rows = [(what, value) for what, value in rows if value is not None]
    if not rows:
        return ""
    table = table_of(
        ("other neighbours, at the same delta", "epsilon"), [(what, epsilon_text(value)) for what, value in rows]
    )
    tan = "" if numbers["tan"] is None else f" Total amount of noise (TAN, Sander et al. 2023): {numbers['tan']:.4g}."
    return f"{table}\n\nPLD upper bounds on a coarser grid; the groups leave out the cap.{tan}"


def _by_delta(numbers: Card) -> str:
    curve = numbers["epsilon_by_delta"]
    if not curve:
        return ""
    head = ["delta", *(f"{delta:.6g}" for delta, _ in curve)]
    return table_of(head, [["epsilon", *(epsilon_text(value) for _, value in curve)]])


def _attack(numbers: Card) -> str:
    found = numbers["attack"]
    if found is None:
        return ""
    rows = [
        (f"true-positive rate at false-positive rate {rate}", f"at most {_percent(value)}")
        for rate, value in found["true_positive"].items()
    ]
    rows.append(
        ("advantage: true-positive less false-positive rate, anywhere", f"at most {_percent(found['advantage'])}")
    )
    head = ("any attack that tells whether one given example took part", "bound")
    return f"{table_of(head, rows)}\n\nFrom epsilon(delta) for all delta (trade-off function, Dong et al. 2022)."


def _percent(value: float) -> str:
    return f"{rounded_up(min(100 * value, 100.0), 2)} %"


def _logged(card: Card) -> str:
    logged = card["logged_without_noise"]
    return f"{logged['statement']}\nIn `{logged['where']}`:\n\n{bullets(logged['quantities'])}"


def _not_covered(card: Card) -> str:
    return bullets(card["not_covered"]["points"])


def _provenance(card: Card) -> str:
    found = card["provenance"]
    ledger, sessions = found["ledger"], found["sessions"]
    mirror = f"in {ledger['mirrored_sessions']} of {len(sessions)} sessions"
    none = "none: a rollback of the whole folder would not be detected"
    rows = [
        ("code commit at opening", code(found["commit"])),
        (
            "first started (UTC)",
            f"{cell(found['opened_utc'])}; later records repeat this time, since clocks tell of the data",
        ),
        ("state", f"closed: {cell(found['closed'])}" if found["closed"] else "open: the run may go on"),
        ("ledger", f"`{ledger['file']}`, {ledger['lines']:,} lines, format {ledger['format']}, hash chain verified"),
        ("SHA-256 of its last line", code(ledger["last_line_sha256"])),
        ("mirror of the ledger", mirror if ledger["mirrored_sessions"] else none),
    ]
    recheck = (
        "To recheck the claim with dp-accounting alone: `python tests/privacy/ledger_epsilon.py RUN/ledger.jsonl`."
    )
    return f"{facts(rows)}\n\n{_sessions(sessions)}\n\n{recheck}"


def _sessions(sessions: Sequence[Card]) -> str:
    if not sessions:
        return "The program was never started on this ledger."
    head = ("session", "commit", "uncommitted changes", "mirror", "versions")
    modified = {True: "**yes**", False: "no"}
    rows = [
        (
            str(number),
            code((session["commit"] or "")[:12]),
            modified.get(session["modified"], "unknown"),
            "yes" if session["mirror"] else "no",
            _versions(session),
        )
        for number, session in enumerate(sessions, start=1)
    ]
    return table_of(head, rows)


def _versions(session: Card) -> str:
    packages = session["packages"] if isinstance(session["packages"], dict) else {}
    named = {"python": session["python"] or "unknown", **packages}
    return ", ".join(f"{cell(name)} {cell(version)}" for name, version in named.items())


_SECTIONS = (
    ("Setting and trust boundary", _setting),
    ("What is released", _released),
    ("Unit of privacy", _unit),
    ("Adjacency", _adjacency),
    ("Mechanism", _mechanism),
    ("Sampling", _sampling),
    ("Accounting", _accounting),
    ("Hyper-parameter tuning", tuning),
    ("Public pre-training data", public_data),
    ("What was logged without noise, and where", _logged),
    ("What is not covered", _not_covered),
    ("Code, ledger and sessions", _provenance),
    ("Audit", audit),
    ("Utility (not attested)", utility),
)
