"""Speculative sampling: tokens are distributed as without it, and seeds give the same tokens again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_fakes import PROMPTS, greedy, make_engine, run_all, tokens_of

from sparse_compile.runtime.blocks import BlockPlan, run_round
from sparse_compile.runtime.choices import Luck, accept_or_draw
from sparse_compile.runtime.engine import Engine, EngineOptions
from sparse_compile.runtime.flights import FlightPlan, run_step
from sparse_compile.runtime.kv_pool import KVPool, KVSpec
from sparse_compile.runtime.options import Drafting
from sparse_compile.runtime.plan import RowPlan
from sparse_compile.runtime.request import SamplingParams
from sparse_compile.runtime.sampler import Drawn, draw

VOCAB = 8
LIMIT = {7: 24.3, 56: 94.5}  # chi-square by degrees of freedom, one in a thousand


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Of rows of counts against their distributions."""
    expected = counts.sum(-1, keepdim=True) * probs
    return float(((counts - expected) ** 2 / expected).sum())


class Chain:
    """An executor whose next token depends on the last one alone: by `final`, and in drafts by `early`."""

    loops = 3

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.final = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        self.early = self.final + torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)

    def prefill(self, plan: RowPlan) -> torch.Tensor:
        return self.final[plan.token_ids[plan.logit_rows]]

    decode = verify = prefill

    def draft(self, plan: RowPlan) -> torch.Tensor:
        return self.early[plan.token_ids[plan.logit_rows]]

    def round(self, plan: BlockPlan) -> Drawn:
        return run_round(self, plan)

    def step(self, plan: FlightPlan) -> Drawn:
        return run_step(self, plan)

    def advance(self, plan: RowPlan) -> torch.Tensor:
        ends = plan.row_loop[plan.logit_rows, None] == self.loops - 1
        return torch.where(ends, self.prefill(plan), self.draft(plan))


def chain_engine(drafting: Drafting | None, async_steps: bool = False) -> tuple[Engine, Chain]:
    pool, executor = KVPool(KVSpec(1, 1, 1, 16, torch.float64), 201, "cpu"), Chain()
    options = EngineOptions(max_context=32, max_seqs=100, drafting=drafting, async_steps=async_steps)
    return Engine(executor, pool, None, options), executor  # type: ignore[arg-type]


def counted(drafting: Drafting | None, requests: int = 1000, new: int = 21) -> tuple[torch.Tensor, Engine]:
    """How often each token followed each other one, [VOCAB, VOCAB], beyond the token of the prompt's run."""
    engine, _ = chain_engine(drafting)
    for n in range(requests):
        generator = torch.Generator().manual_seed(n)
        engine.add_request([n % VOCAB], SamplingParams(new, do_sample=True, generator=generator), str(n))
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for got in tokens.values():
        pairs = torch.tensor([got[:-1], got[1:]])
        counts.index_put_(
            (pairs[0], pairs[1]), torch.ones(len(got) - 1, dtype=torch.float64), accumulate=True
        )
    return counts, engine


@pytest.mark.parametrize("drafting", [Drafting(1, 4), Drafting(1, 3, pipeline=True)], ids=str)
def test_a32_twenty_thousand_draws_have_the_distribution_of_plain_sampling(drafting: Drafting) -> None:
    """Given the token before: 8 distributions of 8 tokens, 56 degrees of freedom."""
    counts, engine = counted(drafting)
    look, final = engine.metrics(), Chain().final.softmax(-1)
    assert int(counts.sum()) == 20_000
    assert 0.3 < look.accepted_tokens / look.drafted_tokens < 0.9  # both ways of getting a token count
    assert chi_square(counts, final) < LIMIT[56]
    assert chi_square(counts, Chain().early.softmax(-1)) > 10 * LIMIT[56]  # it would show


def accepted(
    target: torch.Tensor, drafts: torch.Tensor, proposal: torch.Tensor, generator: torch.Generator | None
) -> torch.Tensor:
    luck = Luck.of(len(target), target[:1], generator)
    return accept_or_draw(target, drafts[:, None], proposal, luck.keeps, luck.finals)[:, 0]


@pytest.mark.parametrize("seed", range(3))
def test_a_row_with_a_draft_has_the_distribution_of_its_target(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, VOCAB, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    q = torch.where(torch.arange(VOCAB) == seed, 0, q)  # some tokens are never drafted
    q = q / q.sum()
    rows = 20_000
    target, proposal = p.expand(rows, -1), q.expand(rows, -1)
    drafts = draw(proposal, generator)[:, 0]
    tokens = accepted(target, drafts, proposal, generator)
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert chi_square(counts, p) < LIMIT[7]
    assert float((tokens == drafts).double().mean()) == pytest.approx(
        float(torch.minimum(p, q).sum()), abs=0.02
    )


def test_equal_distributions_accept_every_draft() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(500, VOCAB, generator=generator).softmax(-1)
    drafts = draw(p, generator)[:, 0]
    assert torch.equal(accepted(p, drafts, p, generator), drafts)


def test_a_draft_that_was_no_number_is_not_accepted() -> None:
    """Then the token comes from the target alone."""
    p = torch.tensor([[0.0, 1.0]]).expand(50, -1)
    drafts, proposal = torch.zeros(50, dtype=torch.int64), torch.full((50, 2), torch.nan)
    assert (accepted(p, drafts, proposal, None) == 1).all()


@pytest.mark.parametrize("drafting", [Drafting(1, 3), Drafting(3, 3), Drafting(1, 3, pipeline=True)], ids=str)
def test_seeds_give_the_same_tokens_alone_in_a_batch_and_after_a_fault(drafting: Drafting) -> None:
    def params(seed: int) -> dict[str, Any]:
        return {"do_sample": True, "generator": torch.Generator().manual_seed(seed)}

    alone = []
    for n, prompt in enumerate(PROMPTS):
        engine, _ = make_engine(slots=64, drafting=drafting)
        name = engine.add_request(prompt, greedy(9, **params(n)))
        alone.append(tokens_of(run_all(engine)[name]))
    for when in ("before", "after"):
        engine, executor = make_engine(slots=64, drafting=drafting)
        names = [engine.add_request(prompt, greedy(9, **params(n))) for n, prompt in enumerate(PROMPTS)]
        steps = iter(range(100))

        def break_one(when: str = when, steps: Any = steps, executor: Any = executor) -> None:
            executor.fault = (when, RuntimeError("once")) if next(steps) % 2 else None

        outputs = run_all(engine, break_one)
        assert engine.metrics().failed_runs > 1
        assert [tokens_of(outputs[name]) for name in names] == alone
