"""Checks of a sandbox run, which trains on canaries by the code that trains, against the plan.

The sandbox's weights move by exactly the released gradient, which an adversary would see. The
expected outcome of each attempt is computed a second time: the members of the batch by a second
sampler; the clipped gradient of each canary in double precision; the noise from the numbers that
its source returned. Only the distribution of the source's numbers is left to chance.

Shapes: A attempts, of which the first S are silent (the noise source returns zeros) and T are
    noisy; D
coordinates of all trainable parameters, Q of them without any gradient; N examples, all of them
canaries; K entries of their gradients.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from privacy.audit.audit_report import AuditReport, Check, fact, random_check
from privacy.audit.second_sampler import Attempt, SecondSampler
from privacy.clipping.clip_factors import FUNCTIONS
from privacy.plan.numbers import PrivacyPlan
from privacy.run.run import Run
from trainer.audit.canary_model import KEY_BITS, Canaries

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Tapes = Sequence[tuple[list[dict[str, Any]], list[Any]]]
CLOSE = 0.01
"""The relative error that rounding in lower precision may cause in an example's contribution."""
NO_OWNER = -1
CROWD_OWNER = -2


def _at_most(name: str, statistic: float, limit: float, sentence: str) -> Check:
    return fact(name, statistic <= limit, sentence, statistic=statistic, threshold=limit)


class Judge:
    """Compares the tapes of a sandbox run with the plan.

    Of hostile canaries it checks only that they are within the bound.

    Attributes:
        audited: the plan of the audited run; `plan`, that of the sandbox, has its sigma, C and
            slack.
        tapes: of each rank its attempts and fsyncs (sandbox.py).
        micro_batches: rows of a micro-batch, by session.
        ranks_A: for each attempt the note of each rank; `first_A` has that of rank 0.
        sigma, bound: noise multiplier and C, as the audited run states them and never as the
        sandbox
            used them.
        step: h of sums and noise, as the opening of the ledger states it.
        whole_AD: the gradient that the optimizer got, times the public batch size, in steps;
            `sums_AD` is that times h.
        included_AN: chosen by the sampler and in the data, which `present_N` says.
        owner_D: the canary that alone has a gradient at a coordinate, NO_OWNER, or CROWD_OWNER.
        factors_K: the clip factor of every entry.
    """

    def __init__(
        self,
        audited: PrivacyPlan,
        run: Run,
        tapes: Tapes,
        micro_batches: Sequence[int],
        canaries: Canaries,
        present_N: Flags,
    ) -> None:
        self.audited = audited
        self.plan = run.plan
        self.canaries = canaries
        self.micro_batches = micro_batches
        self.engine = run.engine
        self.folder = run.folder
        self.fsyncs = [fsync for _, fsyncs in tapes for fsync in fsyncs]
        self.entries = canaries.entries(self.engine.compute_dtype)
        self.ranks_A = list(zip(*(attempts for attempts, _ in tapes), strict=True))
        self.first_A = [notes[0] for notes in self.ranks_A]
        self.records = self.folder.ledger.read_bytes()
        self.silent = sum(note["silent"] for note in self.first_A)
        self.sigma = audited.noise_multiplier
        self.bound = audited.max_grad_norm
        self.step = math.ldexp(1.0, -run.ledger.opened["sum_exponent"])
        self.handed_AD = self.by_coordinate("handed")
        self.whole_AD = np.rint(self.handed_AD * self.plan.expected_batch_size / self.step)
        self.sums_AD = self.whole_AD * self.step
        self.included_AN = np.zeros((len(self.ranks_A), self.plan.num_examples), dtype=bool)
        for included_N, notes in zip(self.included_AN, self.ranks_A, strict=True):
            included_N[np.concatenate([note["ids"] for note in notes])] = True
        self.included_AN &= present_N
        names_K, index_K, canaries_K, _ = self.entries
        self.size = self.sums_AD.shape[1]
        # The coordinate of each entry, in the order of the owners.
        self.coordinate_K = np.zeros_like(index_K)
        start = 0
        for name, offset, length in itertools.chain(*self.engine.layout.pieces):
            is_in_piece_K = (index_K >= offset) & (index_K < offset + length)
            piece_K = (names_K == name) & is_in_piece_K
            self.coordinate_K[piece_K] = index_K[piece_K] - offset + start
            start += length
        self.is_honest_K = ~canaries.hostile_N[canaries_K]
        self.owner_D = np.full(self.size, NO_OWNER)
        owners_K = np.where(canaries.crowd_N[canaries_K], CROWD_OWNER, canaries_K)
        self.owner_D[self.coordinate_K] = owners_K
        self.factors_K = self._factors()

    def by_coordinate(self, name: str) -> Floats:
        """Returns a field of the notes for all coordinates in the order of their owners, (A, D)."""
        rows = []
        for notes in self.ranks_A:
            rows.append(np.concatenate([note[name] for note in notes]))
        return np.stack(rows)

    def _factors(self) -> Floats:
        """Returns the clip factor of every entry, (K,)."""
        names = list(self.engine.shapes)
        count = self.plan.num_examples
        function = FUNCTIONS[self.plan.clipping_function](names, self.bound)
        group_K = np.array([function.group_of[name] for name in self.entries.names_K.tolist()])
        squares_K = np.where(self.is_honest_K, self.entries.gains_K, 0.0) ** 2
        factors_K = np.zeros(len(group_K))
        for group, group_bound in enumerate(function.bounds):
            in_K = group_K == group
            canaries_of_group = self.entries.canaries_K[in_K]
            squared_N = np.bincount(canaries_of_group, squares_K[in_K], count)
            norms_N = torch.from_numpy(np.sqrt(squared_N))
            weight_N = function.weight(norms_N, group_bound).numpy()
            factors_K[in_K] = weight_N[canaries_of_group]
        return factors_K

    def due(self, included_N: Flags) -> tuple[Floats, Floats]:
        """Returns the clipped sum, and the error that it may have, both (D,).

        The error is 0 where nothing is clipped, and CLOSE elsewhere. Rounding to steps comes on
        top, but not for a crowd, whose members are whole steps.
        """
        in_K = self.is_honest_K & included_N[self.entries.canaries_K]
        coordinates = self.coordinate_K[in_K]
        clipped = self.factors_K[in_K] * self.entries.gains_K[in_K]
        errors = np.where(self.factors_K[in_K] == 1, 0.0, CLOSE) * np.abs(clipped)
        sum_D = np.bincount(coordinates, clipped, self.size).astype(np.float64)
        error_D = np.bincount(coordinates, errors, self.size).astype(np.float64)
        return sum_D, error_D

    def report(self, **facts: str) -> AuditReport:
        """Returns the report of all checks of the sandbox run."""
        before_AD = self.by_coordinate("before")
        after_AD = self.by_coordinate("after")
        if not np.isfinite(after_AD).all():
            sentence = "the weights of the sandbox are not finite: a hostile example reached them"
            return AuditReport("mechanism", [fact("weights", False, sentence)])
        # The step rule is w -= gradient. Weights are stored in fp32, which limits what differences
        # show.
        errors_AD = np.abs(before_AD - after_AD - self.handed_AD)
        roundings_AD = np.maximum(np.abs(before_AD), np.abs(after_AD)) * 2.0**-23 + 1e-300
        largest_error = float((errors_AD / roundings_AD).max())
        # Between two steps the weights rest, and a retry begins with the weights of the first
        # attempt.
        num_moved = 0
        starts = {1: np.zeros(self.size)}
        for note, before_D, after_D in zip(self.first_A, before_AD, after_AD, strict=True):
            start_D = starts.get(note["step"], np.zeros(0))
            num_moved += not np.array_equal(start_D, before_D)
            starts[note["step"]] = before_D
            starts[note["step"] + 1] = after_D
        weights_follow = _at_most(
            "weights_follow",
            largest_error,
            4,
            "the weights move by what the optimizer got, which is off by at most "
            f"{largest_error:.2g} roundings of a weight",
        )
        weights_rest = _at_most(
            "weights_rest",
            num_moved,
            0,
            f"{num_moved} attempts began with other weights than the step before them had left",
        )
        checks = [weights_follow, weights_rest]
        checks += self.clipping()
        checks += self.dealt()
        checks += self.noise()
        checks += self.charges()
        return AuditReport("mechanism", checks, facts)

    def norms(self, values_D: Floats) -> Floats:
        """Returns the norm of each canary at the coordinates that it owns, (N,)."""
        is_owned_D = self.owner_D >= 0
        squares = values_D[is_owned_D] ** 2
        return np.sqrt(np.bincount(self.owner_D[is_owned_D], squares, self.plan.num_examples))

    def clipping(self) -> list[Check]:
        """Checks clip, divisor, reduction and membership in silent steps, without noise."""
        shared_D = self.owner_D < 0
        honest_N = ~(self.canaries.hostile_N | self.canaries.crowd_N)
        largest_norm = 0.0
        largest_error = 0.0
        num_mismatches = 0
        largest_loss = 0.0
        for index in range(self.silent):
            sum_D = self.sums_AD[index]
            included_N = self.included_AN[index]
            due_D, allowed_D = self.due(included_N)
            due_of_all_D, _ = self.due(np.ones_like(included_N))
            due_norms_N = self.norms(due_of_all_D)
            norms_N = self.norms(sum_D)
            error_D = np.abs(sum_D - due_D)
            largest_norm = max(largest_norm, float(norms_N.max() / self.bound))
            contributes_N = norms_N > due_norms_N / 2
            num_mismatches += int((contributes_N != included_N)[honest_N].sum())
            relative_error_N = self.norms(error_D)[honest_N] / due_norms_N[honest_N]
            largest_error = max(largest_error, float(relative_error_N.max()))
            exact_D = shared_D | ~included_N[self.owner_D]
            loss_D = error_D[exact_D] / (allowed_D[exact_D] + 1e-300)
            largest_loss = max(largest_loss, float(loss_D.max()))
        limit = 1 + self.plan.sensitivity_slack + 1e-6
        sensitivity = _at_most(
            "sensitivity",
            largest_norm,
            limit,
            f"without noise one example moves the sum by at most {largest_norm:.6g} C, "
            f"and {limit:.6g} C is allowed",
        )
        divisor = _at_most(
            "divisor",
            largest_error,
            CLOSE,
            f"times {self.plan.expected_batch_size}, canaries contribute what clipping leaves, "
            f"but for {largest_error:.2g} of it",
        )
        membership = _at_most(
            "membership",
            num_mismatches,
            0,
            f"{num_mismatches} times a canary contributes that was not chosen, or does not and was",
        )
        whole_sums = _at_most(
            "whole_sums",
            largest_loss,
            1,
            "sums of a crowd that is not clipped, and of nobody, are off by "
            f"{largest_loss:.2g} times what may be lost",
        )
        return [sensitivity, divisor, membership, whole_sums]

    def dealt(self) -> list[Check]:
        """Compares members, order and keys of each rank with those of a second sampler."""
        plan = self.plan
        secret = self.folder.key.read_bytes()
        second = SecondSampler(secret, plan.num_examples, plan.expected_batch_size, plan.cap)
        records = [json.loads(line) for line in self.records.splitlines()]
        sessions = [record for record in records if record["type"] == "session"]
        nonces = [bytes.fromhex(session["nonce"]) for session in sessions]
        num_repeated = len(nonces) - len(set(nonces))
        wrong_steps = []
        num_wrong_keys = 0
        num_attempts = Counter[int]()
        # Attempts are counted by the sandbox's steps, and not by its ledger.
        for notes in self.ranks_A:
            step = notes[0]["step"]
            session = notes[0]["session"]
            attempt = Attempt(nonces[session], step, num_attempts[step])
            num_attempts[step] += 1
            size = self.micro_batches[session]
            num_rows = size * math.ceil(plan.max_batch_size / len(notes) / size)
            _, members = second.members(attempt)
            deal = second.deal(attempt, members, num_rows, len(notes))
            for (ids, rows), note in zip(deal, notes, strict=True):
                if not np.array_equal(ids[rows.argsort()], note["ids"]):
                    wrong_steps.append(step)
                keys = second.keys(attempt, note["ids"]) & np.uint64(KEY_BITS)
                num_wrong_keys += int((keys != note["keys"]).sum())
        first_step = f" (first at step {wrong_steps[0]})" if wrong_steps else ""
        dealt_members = _at_most(
            "dealt_members",
            len(wrong_steps),
            0,
            f"{len(wrong_steps)} times others reached a rank than a second sampler says, "
            f"or in another order{first_step}",
        )
        example_keys = _at_most(
            "example_keys",
            num_wrong_keys,
            0,
            f"{num_wrong_keys} examples came with another key than that of their identity, "
            "step and attempt",
        )
        nonces_are_new = _at_most(
            "nonces_are_new",
            num_repeated,
            0,
            f"{num_repeated} of {len(nonces)} starts had the nonce of an earlier one, "
            "and so its coins",
        )
        return [dealt_members, example_keys, nonces_are_new]

    def noise(self) -> list[Check]:
        """Returns checks that each drawn number is released once, is new, and is Gaussian."""
        plan = self.plan
        std = self.sigma * self.bound
        noisy = slice(self.silent, None)
        quiet_D = self.owner_D == NO_OWNER
        # Without a gradient the optimizer gets noise alone.
        noise_TQ = self.sums_AD[noisy][:, quiet_D] / std
        ratio = float(np.sqrt((noise_TQ**2).mean()))
        num_draws = []
        for notes in self.ranks_A:
            num_draws.append(sum(note["num_draws"] for note in notes))
        fewest_draws = min(num_draws)
        most_draws = max(num_draws)
        draws_for_each = True
        largest_deviation = 0.0
        for note in itertools.chain(*self.ranks_A):
            draws_for_each &= note["num_draws"] == len(note["after"])
            for deviation in note["deviations"]:
                difference = abs(deviation * self.step / std - 1)
                largest_deviation = max(largest_deviation, difference)
        is_drawn_once = fewest_draws == most_draws == self.size and draws_for_each
        num_partial_steps = int((self.handed_AD != self.sums_AD / plan.expected_batch_size).sum())
        squares = float((noise_TQ**2).sum())
        below_p = stats.chi2.cdf(squares, noise_TQ.size)
        above_p = stats.chi2.sf(squares, noise_TQ.size)
        variance_p = 2 * min(below_p, above_p)
        edges = np.arange(-5, 5.5, 0.5)
        num_beyond = np.array([(noise_TQ > edge).sum() for edge in edges])
        chances = stats.norm.sf(edges)
        few_p = stats.binom.cdf(num_beyond, noise_TQ.size, chances)
        many_p = stats.binom.sf(num_beyond - 1, noise_TQ.size, chances)
        least_p = np.minimum(few_p, many_p).min()
        # All edges are compared on both sides.
        tails_p = len(edges) * 2 * float(least_p)
        noise_variance = random_check(
            "noise_variance",
            min(1.0, variance_p),
            f"the released noise has {ratio:.5f} times the planned standard deviation "
            f"{self.sigma:.6g} C ({noise_TQ.size} values)",
            statistic=ratio,
        )
        noise_tails = random_check(
            "noise_tails",
            min(1.0, tails_p),
            "as many values lie beyond -5, -4.5 to 5 deviations as a Gaussian has",
        )
        one_draw_per_coordinate = fact(
            "one_draw_per_coordinate",
            is_drawn_once,
            f"the noise source was asked for {fewest_draws} to {most_draws} numbers a step "
            f"over all ranks, for {self.size} coordinates",
            statistic=float(most_draws),
            threshold=self.size,
        )
        whole_steps = _at_most(
            "whole_steps",
            num_partial_steps,
            0,
            f"{num_partial_steps} coordinates that the optimizer got are no whole steps of the "
            "sums, divided by the batch size",
        )
        stated_deviation = _at_most(
            "stated_deviation",
            largest_deviation,
            1e-9,
            "the source is asked for the stated deviation sigma C but for "
            f"{largest_deviation:.2g} of it",
        )
        checks = [
            noise_variance,
            noise_tails,
            one_draw_per_coordinate,
            whole_steps,
            stated_deviation,
        ]
        if not is_drawn_once:
            return checks
        return [*checks, *self._draws(noisy, quiet_D)]

    def _draws(self, noisy: slice, quiet_D: Flags) -> list[Check]:
        """Compares released sums with the numbers that the source returned."""
        draws_AD = self.by_coordinate("draws")
        drawn_TD = draws_AD[noisy]
        sums = []
        allowances = []
        for included_N in self.included_AN[noisy]:
            due_D, allowed_D = self.due(included_N)
            sums.append(due_D)
            allowances.append(allowed_D)
        due_TD = np.stack(sums)
        allowed_TD = np.stack(allowances)
        # The contribution of a single canary was rounded to a step; a crowd's members are whole
        # steps.
        is_alone_TD = (self.owner_D >= 0) & self.included_AN[noisy][:, self.owner_D]
        is_known_TD = ~(is_alone_TD & self.canaries.hostile_N[self.owner_D])
        difference_TD = np.abs(self.whole_AD[noisy] - drawn_TD - due_TD / self.step)
        excess_TD = difference_TD - allowed_TD / self.step - is_alone_TD
        largest_excess = float(excess_TD[is_known_TD].max())
        quiet_sums_TQ = self.whole_AD[noisy][:, quiet_D]
        num_different = int((quiet_sums_TQ != drawn_TD[:, quiet_D]).sum())
        # The numbers of silent steps did not reach the weights, but they must not come again
        # either. Of N integers with a spacing of h standard deviations, N^2 h / (2 sqrt(pi)) pairs
        # are equal by chance, but for the sign.
        sizes = np.sort(np.abs(draws_AD), axis=None)
        num_equal = int((np.diff(sizes) == 0).sum())
        spacing = self.step / (self.sigma * self.bound)
        chance = draws_AD.size**2 * spacing / (2 * math.sqrt(math.pi))
        most_by_chance = 2 + math.ceil(chance + 5 * math.sqrt(chance))
        # A number of b > 24 bits has no more than 24 by chance once in 2^(b - 24).
        share_of_single = float((drawn_TD.astype(np.float32) == drawn_TD).mean())
        _, num_bits_TD = np.frexp(drawn_TD.astype(float))
        share_by_chance = float(np.minimum(1.0, 2.0 ** (24 - num_bits_TD)).mean())
        added_exactly = _at_most(
            "added_exactly",
            num_different,
            0,
            f"where there is no gradient, {num_different} of {quiet_sums_TQ.size} released "
            "coordinates are not the very number drawn",
        )
        draws_reach_the_weights = _at_most(
            "draws_reach_the_weights",
            largest_excess,
            0,
            "on every coordinate sums and the numbers drawn are released, and "
            f"{max(largest_excess, 0.0):.2g} steps besides",
        )
        draws_are_new = _at_most(
            "draws_are_new",
            num_equal,
            most_by_chance,
            f"{num_equal} of {draws_AD.size} numbers equal an earlier one but for the sign "
            f"(chance gives {chance:.2g})",
        )
        more_than_single_precision = _at_most(
            "more_than_single_precision",
            share_of_single,
            2 * share_by_chance + 1e-3,
            f"{share_of_single:.2g} of the numbers have no more than single precision, whose "
            f"normals end at 5.77 sigma (chance gives {share_by_chance:.2g})",
        )
        return [added_exactly, draws_reach_the_weights, draws_are_new, more_than_single_precision]

    def charges(self) -> list[Check]:
        """Returns checks that each attempt is charged once, as planned, before its release.

        The charge must be durable by then, and the noise must take fresh entropy.
        """
        ledger = self.folder.ledger
        ledger_place = _place(ledger)
        folder_place = _place(ledger.parent)
        fsyncs_of_ledger = []
        for fsync in self.fsyncs:
            if fsync.place == ledger_place:
                fsyncs_of_ledger.append((fsync.returned_at, fsync.size))
        fsyncs_of_ledger.sort()
        # A removed file may have had this inode. A ledger only grows, so its fsyncs begin after the
        # last fall of a size.
        first_fsync = 0
        for number in range(1, len(fsyncs_of_ledger)):
            if fsyncs_of_ledger[number][1] < fsyncs_of_ledger[number - 1][1]:
                first_fsync = number
        fsyncs_of_ledger = fsyncs_of_ledger[first_fsync:]
        # step -> its intents, each with the number of bytes up to its end
        intents: defaultdict[int, list[tuple[dict[str, Any], int]]] = defaultdict(list)
        end = 0
        for line in self.records.splitlines(keepends=True):
            end += len(line)
            record = json.loads(line)
            if record["type"] == "intent":
                intents[record["step"]].append((record, end))
        attempts = Counter(note["step"] for note in self.first_A)
        charges = Counter({step: len(step_intents) for step, step_intents in intents.items()})
        num_uncharged = (attempts - charges).total()
        num_surplus = (charges - attempts).total()
        releases_A = [min(note["released_at"] for note in notes) for notes in self.ranks_A]
        num_late = 0
        num_misstated = 0
        num_attempts = Counter[int]()
        for note, release in zip(self.first_A, releases_A, strict=True):
            step = note["step"]
            # The size of a ledger that holds the intent; no size will do for a missing one.
            size_with_intent = math.inf
            if intents[step]:
                record, size_with_intent = intents[step].pop(0)
                is_attempt = record["attempt"] == num_attempts[step]
                num_misstated += not (is_attempt and self._states_the_plan(record["releases"]))
            num_attempts[step] += 1
            is_durable = any(
                time < release and size >= size_with_intent for time, size in fsyncs_of_ledger
            )
            num_late += not is_durable
        # A folder that was made durable before the file was in it lacks the file's name. The
        # folder's size does not show that: some file systems count names in it, others blocks.
        first_release = min(releases_A)
        inode = ledger.stat().st_ino
        is_name_durable = False
        for fsync in self.fsyncs:
            if fsync.place == folder_place and fsync.returned_at < first_release:
                is_name_durable |= fsync.inodes.get(ledger.name) == inode
        least_entropy = min(note["least_entropy"] for note in itertools.chain(*self.ranks_A))
        charged_attempts = _at_most(
            "charged_attempts",
            num_uncharged + num_surplus + num_misstated,
            0,
            f"{num_uncharged} attempts were made without a charge, {num_surplus} charges are of "
            f"no attempt that was made, and {num_misstated} state another attempt, noise or C "
            "than the plan",
        )
        charge_before_release = _at_most(
            "charge_before_release",
            num_late,
            0,
            f"in {num_late} attempts noise was drawn, or a sum left a process, before an fsync "
            "of the intent had returned",
        )
        ledger_name_durable = fact(
            "ledger_name_durable",
            is_name_durable,
            f"the ledger's name is {'' if is_name_durable else 'not '}durable "
            "before the first noise",
        )
        fresh_entropy = fact(
            "fresh_entropy",
            least_entropy >= 16,
            f"every draw of noise took at least {least_entropy} bytes from the entropy of the "
            "operating system, 16 are needed",
            statistic=least_entropy,
            threshold=16,
        )
        return [charged_attempts, charge_before_release, ledger_name_durable, fresh_entropy]

    def _states_the_plan(self, releases: list[dict[str, Any]]) -> bool:
        """Returns whether an intent lists the gradient with the plan's noise, and nothing else."""
        gradient = releases[0]
        has_std = math.isclose(gradient["std"], self.sigma * self.bound, rel_tol=1e-9)
        has_bound = math.isclose(gradient["sensitivity"], self.bound, rel_tol=1e-9)
        return has_std and has_bound and len(releases) == 1


def _place(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
