"""Is the mechanism the one that the plan states? Checks of a sandbox run, which trains on canaries by the code that trains.

The sandbox's weights move by exactly the released gradient, which is what an adversary would see. What is expected of each
attempt is computed a second time: who is dealt, by a second sampler; what clipping leaves of each canary's gradient, in double
precision; what noise is added, from the numbers that the source gave. So nothing is left to chance but the shape of the source.

Shapes: A attempts, of which the first S are silent (the noise source returns zeros) and T are noisy; D coordinates of all
trainable parameters, Q of them without any gradient; N examples, every one of them a canary; K entries of their gradients.
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

from privacy.audit.report import AuditReport, Check, fact, random_check
from privacy.audit.second_sampler import Attempt, SecondSampler
from privacy.clipping.clip_factors import FUNCTIONS
from privacy.plan.numbers import PrivacyPlan
from privacy.run.run import Run
from trainer.audit.canary_model import KEY_BITS, Canaries

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Tapes = Sequence[tuple[list[dict[str, Any]], list[Any]]]
CLOSE = 0.01
"""How far, relatively, an example's contribution may be from what clipping leaves of it, for rounding in lower precision."""


def _at_most(name: str, value: float, limit: float, sentence: str) -> Check:
    return fact(name, value <= limit, sentence, statistic=value, threshold=limit)


class Judge:
    """Lays what was noted beside what is expected; hostile canaries are known to be within the bound, and no more.

    Attributes:
        audited: the plan of the audited run; that of the sandbox's last session, `run`, has its sigma, C and slack.
        tapes: of each rank its attempts and fsyncs (sandbox.py).
        micro_batches: of each session.
        ranks_A: of each attempt what each rank noted; `first_A` what rank 0 did.
        sigma, bound: noise multiplier and C, as the audited run states them and never as the sandbox used them.
        step: h of sums and noise, as the opening of the ledger states it.
        whole_AD: what the optimizer got, times the public batch size, in steps; `sums_AD` is that times h.
        included_AN: chosen by the sampler and in the data, which `present_N` says.
        owner_D: the canary that alone touches a coordinate, -1 for nobody, and -2 for the crowd.
        factors_K: what clipping multiplies every entry by.
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
        self.audited, self.plan, self.canaries, self.micro_batches = (
            audited,
            run.plan,
            canaries,
            micro_batches,
        )
        self.engine, self.folder, self.fsyncs = (
            run.engine,
            run.folder,
            [one for _, many in tapes for one in many],
        )
        self.entries = canaries.entries(self.engine.compute_dtype)
        self.ranks_A = list(zip(*(attempts for attempts, _ in tapes), strict=True))
        self.first_A = [ranks[0] for ranks in self.ranks_A]
        self.records, self.silent = (
            self.folder.ledger.read_bytes(),
            sum(noted["silent"] for noted in self.first_A),
        )
        self.sigma, self.bound = audited.noise_multiplier, audited.max_grad_norm
        self.step = math.ldexp(1.0, -run.ledger.opened["sum_exponent"])
        self.handed_AD = self.beside("handed")
        self.whole_AD = np.rint(self.handed_AD * self.plan.expected_batch_size / self.step)
        self.sums_AD = self.whole_AD * self.step
        self.included_AN = np.zeros((len(self.ranks_A), self.plan.num_examples), dtype=bool)
        for included_N, ranks in zip(self.included_AN, self.ranks_A, strict=True):
            included_N[np.concatenate([noted["ids"] for noted in ranks])] = True
        self.included_AN &= present_N
        names_K, index_K, canaries_K, _ = self.entries
        self.size, start, self.at_K = self.sums_AD.shape[1], 0, np.zeros_like(index_K)
        for name, offset, length in itertools.chain(*self.engine.layout.pieces):
            here_K = (names_K == name) & (index_K >= offset) & (index_K < offset + length)
            self.at_K[here_K] = index_K[here_K] - offset + start
            start += length
        self.known_K, self.owner_D = ~canaries.hostile_N[canaries_K], np.full(self.size, -1)
        self.owner_D[self.at_K] = np.where(canaries.crowd_N[canaries_K], -2, canaries_K)
        self.factors_K = self._factors()

    def beside(self, name: str) -> Floats:
        """(A, D): coordinates in the order of their owners."""
        return np.stack(
            [np.concatenate([noted[name] for noted in ranks]) for ranks in self.ranks_A]
        )

    def _factors(self) -> Floats:
        """Returns what clipping multiplies the entries by, (K,)."""
        names, count = list(self.engine.shapes), self.plan.num_examples
        function = FUNCTIONS[self.plan.clipping_function](names, self.bound)
        group_K = np.array([function.group_of[name] for name in self.entries.names_K.tolist()])
        squares_K = np.where(self.known_K, self.entries.gains_K, 0.0) ** 2
        factors_K = np.zeros(len(group_K))
        for group, of_group in enumerate(function.bounds):
            in_K = group_K == group
            squared_N = np.bincount(self.entries.canaries_K[in_K], squares_K[in_K], count)
            weight_N = function.weight(torch.from_numpy(np.sqrt(squared_N)), of_group).numpy()
            factors_K[in_K] = weight_N[self.entries.canaries_K[in_K]]
        return factors_K

    def due(self, included_N: Flags) -> tuple[Floats, Floats]:
        """(D,) the clipped sum, and how far it may be from that: not at all where nothing was clipped, and CLOSE elsewhere.

        (Rounding to steps comes on top, but for a crowd, whose members are whole steps.)
        """
        here = self.known_K & included_N[self.entries.canaries_K]
        values = self.factors_K[here] * self.entries.gains_K[here]
        loose = np.where(self.factors_K[here] == 1, 0.0, CLOSE) * np.abs(values)
        sums_2D = [
            np.bincount(self.at_K[here], of, self.size).astype(np.float64) for of in (values, loose)
        ]
        return sums_2D[0], sums_2D[1]

    def report(self, **facts: str) -> AuditReport:
        """All checks of the sandbox run."""
        before_AD, after_AD = self.beside("before"), self.beside("after")
        if not np.isfinite(after_AD).all():
            sentence = "the weights of the sandbox are not finite: a hostile example reached them"
            return AuditReport("mechanism", [fact("weights", False, sentence)])
        # The step rule is w -= what the optimizer got. Weights are stored in fp32, which limits what differences show.
        apart_AD = np.abs(before_AD - after_AD - self.handed_AD)
        resolution_AD = np.maximum(np.abs(before_AD), np.abs(after_AD)) * 2.0**-23 + 1e-300
        off = float((apart_AD / resolution_AD).max())
        follow = f"the weights move by what the optimizer got, which is off by at most {off:.2g} roundings of a weight"
        # From one step to the next nothing moves them, and a retry begins where the step began before.
        moved, before_step = 0, {1: np.zeros(self.size)}
        for noted, before_D, after_D in zip(self.first_A, before_AD, after_AD, strict=True):
            moved += not np.array_equal(before_step.get(noted["step"], np.zeros(0)), before_D)
            before_step |= {noted["step"]: before_D, noted["step"] + 1: after_D}
        rest = f"{moved} attempts began with other weights than the step before them had left"
        checks = [
            _at_most("weights_follow", off, 4, follow),
            _at_most("weights_rest", moved, 0, rest),
        ]
        checks += [*self.clipping(), *self.dealt()]
        checks += [*self.noise(), *self.charges()]
        return AuditReport("mechanism", checks, facts)

    def clipping(self) -> list[Check]:
        """Clip, divisor, reduction and membership in silent steps, without noise in the way."""
        count, own_D, shared_D = self.plan.num_examples, self.owner_D >= 0, self.owner_D < 0
        honest_N = ~(self.canaries.hostile_N | self.canaries.crowd_N)

        def norms(values_D: Floats) -> Floats:
            """(N,) of canaries that own their coordinates."""
            return np.sqrt(np.bincount(self.owner_D[own_D], values_D[own_D] ** 2, count))

        largest, furthest, mismatches, whole = 0.0, 0.0, 0, 0.0
        for index in range(self.silent):
            sum_D, included_N = self.sums_AD[index], self.included_AN[index]
            due_D, loose_D = self.due(included_N)
            all_N = norms(self.due(np.ones_like(included_N))[0])
            norms_N, apart_D = norms(sum_D), np.abs(sum_D - due_D)
            largest = max(largest, float(norms_N.max() / self.bound))
            mismatches += int(((norms_N > all_N / 2) != included_N)[honest_N].sum())
            furthest = max(furthest, float((norms(apart_D)[honest_N] / all_N[honest_N]).max()))
            exact_D = shared_D | ~included_N[self.owner_D]
            whole = max(whole, float((apart_D[exact_D] / (loose_D[exact_D] + 1e-300)).max()))
        limit = 1 + self.plan.sensitivity_slack + 1e-6
        moves = f"without noise one example moves the sum by at most {largest:.6g} C, and {limit:.6g} C is allowed"
        divided = f"times {self.plan.expected_batch_size}, canaries contribute what clipping leaves, but for {furthest:.2g} of it"
        chosen = f"{mismatches} times a canary contributes that was not chosen, or does not and was"
        exact = f"sums of a crowd that is not clipped, and of nobody, are off by {whole:.2g} times what may be lost"
        return [
            _at_most("sensitivity", largest, limit, moves),
            _at_most("divisor", furthest, CLOSE, divided),
            _at_most("membership", mismatches, 0, chosen),
            _at_most("whole_sums", whole, 1, exact),
        ]

    def dealt(self) -> list[Check]:
        """Who reached the model on each rank, in which order and with which keys, is what a second sampler says."""
        plan, secret = self.plan, self.folder.key.read_bytes()
        second = SecondSampler(secret, plan.num_examples, plan.expected_batch_size, plan.cap)
        lines = [json.loads(line) for line in self.records.splitlines()]
        nonces = [bytes.fromhex(line["nonce"]) for line in lines if line["type"] == "session"]
        repeated = f"{len(nonces) - len(set(nonces))} of {len(nonces)} starts had the nonce of an earlier one, and so its coins"
        others, other_keys, before = [], 0, Counter[int]()
        # Attempts are counted by what the sandbox did, and not by what its ledger says.
        for ranks in self.ranks_A:
            step, session = ranks[0]["step"], ranks[0]["session"]
            attempt, size = (
                Attempt(nonces[session], step, before[step]),
                self.micro_batches[session],
            )
            before[step] += 1
            num_rows = size * math.ceil(plan.max_batch_size / len(ranks) / size)
            dealt = second.deal(attempt, second.members(attempt)[1], num_rows, len(ranks))
            for (ids, rows), noted in zip(dealt, ranks, strict=True):
                others += [] if np.array_equal(ids[rows.argsort()], noted["ids"]) else [step]
                other_keys += int(
                    (
                        (second.keys(attempt, noted["ids"]) & np.uint64(KEY_BITS)) != noted["keys"]
                    ).sum()
                )
        where = f" (first at step {others[0]})" if others else ""
        members = f"{len(others)} times others reached a rank than a second sampler says, or in another order{where}"
        keys = f"{other_keys} examples came with another key than that of their identity, step and attempt"
        return [
            _at_most("dealt_members", len(others), 0, members),
            _at_most("example_keys", other_keys, 0, keys),
            _at_most("nonces_are_new", len(nonces) - len(set(nonces)), 0, repeated),
        ]

    def noise(self) -> list[Check]:
        """Every number that the source gave is in the released sum once, is new, and of the stated Gaussian."""
        plan, sigma = self.plan, self.sigma
        noisy, quiet_D, draws_AD = (
            slice(self.silent, None),
            self.owner_D == -1,
            self.beside("draws"),
        )
        z = self.sums_AD[noisy][:, quiet_D] / (sigma * self.bound)
        num_draws = [sum(noted["num_draws"] for noted in ranks) for ranks in self.ranks_A]
        ratio, fewest, most = float(np.sqrt((z**2).mean())), min(num_draws), max(num_draws)
        whole = f"the released noise has {ratio:.5f} times the planned standard deviation {sigma:.6g} C ({z.size} values)"
        asked = f"the noise source was asked for {fewest} to {most} numbers a step over all ranks, for {self.size} coordinates"
        each = [
            noted["num_draws"] == len(noted["after"]) for ranks in self.ranks_A for noted in ranks
        ]
        asked_well = fewest == most == self.size and all(each)
        apart = self.handed_AD != self.sums_AD / plan.expected_batch_size
        deviations = [
            deviation * self.step / (sigma * self.bound) - 1
            for ranks in self.ranks_A
            for noted in ranks
            for deviation in noted["deviations"]
        ]
        off = max(map(abs, deviations), default=0.0)
        scale = f"the source is asked for the stated deviation sigma C but for {off:.2g} of it"
        steps = f"{int(apart.sum())} coordinates that the optimizer got are no whole steps of the sums, divided by the batch size"
        squares, edges = float((z**2).sum()), np.arange(-5, 5.5, 0.5)
        variance_p = 2 * min(stats.chi2.cdf(squares, z.size), stats.chi2.sf(squares, z.size))
        beyond, chances = np.array([(z > edge).sum() for edge in edges]), stats.norm.sf(edges)
        least_p = np.minimum(
            stats.binom.cdf(beyond, z.size, chances), stats.binom.sf(beyond - 1, z.size, chances)
        ).min()
        tails = "as many values lie beyond -5, -4.5 to 5 deviations as a Gaussian has"
        checks = [
            random_check("noise_variance", min(1.0, variance_p), whole, statistic=ratio),
            random_check("noise_tails", min(1.0, len(edges) * 2 * float(least_p)), tails),
            fact(
                "one_draw_per_coordinate",
                asked_well,
                asked,
                statistic=float(most),
                threshold=self.size,
            ),
            _at_most("whole_steps", int(apart.sum()), 0, steps),
            _at_most("stated_deviation", off, 1e-9, scale),
        ]
        if not asked_well:
            return checks
        found = [self.due(included_N) for included_N in self.included_AN[noisy]]
        due_TD, loose_TD = (np.stack(column) for column in zip(*found, strict=True))
        drawn_TD = draws_AD[noisy]
        # Where one canary contributes, that was rounded to a step; a crowd's members are whole steps.
        is_alone_TD = (self.owner_D >= 0) & self.included_AN[noisy][:, self.owner_D]
        is_known_TD = ~(is_alone_TD & self.canaries.hostile_N[self.owner_D])
        apart_TD = (
            np.abs(self.whole_AD[noisy] - drawn_TD - due_TD / self.step)
            - loose_TD / self.step
            - is_alone_TD
        )
        besides = float(apart_TD[is_known_TD].max())
        reach = f"on every coordinate sums and the numbers drawn are released, and {max(besides, 0.0):.2g} steps besides"
        # Where there is no gradient the optimizer gets noise alone.
        differing = int((self.whole_AD[noisy][:, quiet_D] != drawn_TD[:, quiet_D]).sum())
        exact = f"where there is no gradient, {differing} of {z.size} released coordinates are not the very number drawn"
        # The numbers of silent steps did not reach the weights, but they must not come again either.
        # Of integers with a spacing of h standard deviations, N^2 h / (2 sqrt(pi)) pairs are equal by
        # chance, but for the sign.
        duplicates = int((np.diff(np.sort(np.abs(draws_AD), axis=None)) == 0).sum())
        spacing = self.step / (sigma * self.bound)
        chance = draws_AD.size**2 * spacing / (2 * math.sqrt(math.pi))
        most_by_chance = 2 + math.ceil(chance + 5 * math.sqrt(chance))
        equal = f"{duplicates} of {draws_AD.size} numbers equal an earlier one but for the sign (chance gives {chance:.2g})"
        # A number of b > 24 bits has no more than 24 by chance once in 2^(b - 24).
        disguised = float((drawn_TD.astype(np.float32) == drawn_TD).mean())
        by_chance = float(np.minimum(1.0, 2.0 ** (24 - np.frexp(drawn_TD.astype(float))[1])).mean())
        single = (
            f"{disguised:.2g} of the numbers have no more than single precision, whose normals end at 5.77 sigma (chance gives "
            f"{by_chance:.2g})"
        )
        return [
            *checks,
            _at_most("added_exactly", differing, 0, exact),
            _at_most("draws_reach_the_weights", besides, 0, reach),
            _at_most("draws_are_new", duplicates, most_by_chance, equal),
            _at_most("more_than_single_precision", disguised, 2 * by_chance + 1e-3, single),
        ]

    def charges(self) -> list[Check]:
        """Every attempt is charged once, as the plan states it, durably before any of it is released; noise has fresh entropy."""

        def place(path: Path) -> tuple[int, int]:
            return path.stat().st_dev, path.stat().st_ino

        ledger = self.folder.ledger
        of_ledger, of_folder = place(ledger), place(ledger.parent)
        in_ledger = sorted(
            (fsync.at, fsync.size) for fsync in self.fsyncs if fsync.place == of_ledger
        )
        # A file that is gone may have had this inode. What is appended to only grows, so it begins after sizes fell.
        falls = (
            number
            for number, (one, other) in enumerate(itertools.pairwise(in_ledger), 1)
            if other[1] < one[1]
        )
        in_ledger = in_ledger[max(falls, default=0) :]
        intents: defaultdict[int, list[tuple[dict[str, Any], int]]] = defaultdict(
            list
        )  # and their ends, by step
        lines = self.records.splitlines(keepends=True)
        for line, end in zip(
            map(json.loads, lines), itertools.accumulate(map(len, lines)), strict=True
        ):
            if line["type"] == "intent":
                intents[line["step"]].append((line, end))
        made = Counter(noted["step"] for noted in self.first_A)
        charged = Counter({step: len(of_step) for step, of_step in intents.items()})
        missing, differing = (made - charged).total(), (charged - made).total()
        released_A = [min(noted["released_at"] for noted in ranks) for ranks in self.ranks_A]
        late, misstated, before = 0, 0, Counter[int]()
        for noted, released in zip(self.first_A, released_A, strict=True):
            step, needed = noted["step"], math.inf  # of an attempt that was never charged
            if intents[step]:
                line, needed = intents[step].pop(0)
                misstated += line["attempt"] != before[step] or not self._states_the_plan(
                    line["releases"]
                )
            before[step] += 1
            late += not any(at < released for at, size in in_ledger if size >= needed)
        counted = (
            f"{missing} attempts were made without a charge, {differing} charges are of no attempt that was made, and "
            f"{misstated} state another attempt, noise or C than the plan"
        )
        order = f"in {late} attempts noise was drawn, or a sum left a process, before an fsync of the intent had returned"
        # A folder that was made durable before the file was in it does not hold the file's name. Its size says nothing of that:
        # some file systems count names in it, others blocks.
        in_folder = [fsync for fsync in self.fsyncs if fsync.place == of_folder]
        inode = ledger.stat().st_ino
        named = any(
            fsync.at < min(released_A) and fsync.inodes.get(ledger.name) == inode
            for fsync in in_folder
        )
        name = f"the ledger's name is {'' if named else 'not '}durable before the first noise"
        least = min(noted["least_entropy"] for ranks in self.ranks_A for noted in ranks)
        entropy = f"every draw of noise took at least {least} bytes from the entropy of the operating system, 16 are needed"
        return [
            _at_most("charged_attempts", missing + differing + misstated, 0, counted),
            _at_most("charge_before_release", late, 0, order),
            fact("ledger_name_durable", named, name),
            fact("fresh_entropy", least >= 16, entropy, statistic=least, threshold=16),
        ]

    def _states_the_plan(self, releases: list[dict[str, Any]]) -> bool:
        """Whether an intent lists the gradient with the plan's noise, and nothing else."""
        gradient, expected = (
            releases[0],
            {"std": self.sigma * self.bound, "sensitivity": self.bound},
        )
        is_stated = all(
            math.isclose(gradient[name], value, rel_tol=1e-9) for name, value in expected.items()
        )
        return is_stated and len(releases) == 1
