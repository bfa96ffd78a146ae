"""What a request gets back: tokens, reasons, log-probabilities, metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runtime_fakes import (
    PROMPTS,
    SITES,
    FakeSite,
    generate,
    greedy,
    make_engine,
    only,
    oracle,
    oracle_logits,
    run_all,
    tokens_of,
)

from sparse_compile.kernels.retention import Retention
from sparse_compile.runtime.request import Request, RequestMetrics, SamplingParams
from sparse_compile.runtime.sampler import choose, draw, largest

# ---------------------------------------------------------------------- sampling and finishing


def test_finish_by_length() -> None:
    engine, _ = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(1))
    (output,) = engine.step()
    assert (output.finished, output.finish_reason, output.request_id) == (True, "length", name)
    assert engine.step() == []


def test_finish_by_eos_emits_it() -> None:
    tokens = oracle(PROMPTS[0], 6, True)
    cut = next(n for n in range(1, 6) if tokens[n] not in tokens[:n])
    engine, _ = make_engine()
    engine.add_request(
        PROMPTS[0], greedy(6, eos_token_ids=(tokens[cut], 999), stop=lambda ids, scores: False)
    )
    outputs = only(run_all(engine))
    assert tokens_of(outputs) == tokens[: cut + 1]
    assert [output.finish_reason for output in outputs] == [None] * cut + ["eos"]


def test_eos_wins_over_length_and_stop() -> None:
    first = oracle(PROMPTS[0], 1)[0]
    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(1, eos_token_ids=(first,), stop=lambda ids, scores: True))
    assert engine.step()[0].finish_reason == "eos"


def test_stop_rules_see_the_new_token_and_the_scores() -> None:
    seen: list[tuple[list[list[int]], torch.Tensor]] = []

    def stop(ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
        assert ids.dtype == torch.int64
        assert scores is not None
        seen.append((ids.tolist(), scores.clone()))
        return torch.tensor([len(seen) == 3])

    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(6, stop=stop))
    outputs = only(run_all(engine))
    tokens = oracle(PROMPTS[0], 3, True)
    assert tokens_of(outputs) == tokens
    assert outputs[-1].finish_reason == "stop"
    assert [ids for ids, _ in seen] == [[PROMPTS[0] + tokens[: n + 1]] for n in range(3)]
    assert torch.equal(seen[0][1][0], oracle_logits(PROMPTS[0], 3))


def test_a_processor_decides_and_the_logprob_is_of_its_scores() -> None:
    def ban_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.shape[0] == scores.shape[0] == 1
        scores[:, ::2] = -torch.inf  # in place, as transformers' processors may
        return scores

    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(4, processor=ban_even, want_logits=True))
    tokens = list(PROMPTS[0])
    for output in only(run_all(engine)):
        raw = oracle_logits(tokens, 3, True)
        scores = raw.clone()
        scores[::2] = -torch.inf
        assert output.token == int(scores.argmax())
        assert output.token % 2
        assert output.logprob == pytest.approx(float(scores.log_softmax(-1)[output.token]))
        assert output.logits is not None
        assert output.scores is not None
        assert torch.equal(output.logits, raw)
        assert torch.equal(output.scores, scores)
        tokens.append(output.token)


def test_outputs_own_their_logits_and_scores() -> None:
    buffer = torch.zeros(1, 24, dtype=torch.float64)

    def reuse(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return buffer.copy_(scores)

    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(2, processor=reuse, want_logits=True))
    (first,), (second,) = engine.step(), engine.step()
    for output, tokens in ((first, PROMPTS[0]), (second, [*PROMPTS[0], first.token])):
        assert output.logits is not None
        assert output.scores is not None
        assert torch.equal(output.scores, oracle_logits(tokens, 3, True))
        assert torch.equal(output.logits, output.scores)
        assert output.logits.data_ptr() != output.scores.data_ptr()


def test_logprobs_of_plain_greedy_are_those_of_the_raw_logits() -> None:
    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(1))
    (output,) = engine.step()
    expected = oracle_logits(PROMPTS[0], 3).log_softmax(-1)
    assert output.logprob == pytest.approx(float(expected.max()), abs=1e-12)
    assert (output.logits, output.scores) == (None, None)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(8, do_sample=True, generator=torch.Generator().manual_seed(seed))


def test_a_seed_gives_the_same_tokens_whoever_the_neighbours_are() -> None:
    engine, _ = make_engine()
    engine.add_request(PROMPTS[1], sampled(5), "alone")
    alone = tokens_of(run_all(engine)["alone"])
    for neighbour in (greedy(3), sampled(6)):
        engine.add_request(PROMPTS[0], neighbour, "neighbour")
        engine.add_request(PROMPTS[1], sampled(5), "batched")
        assert tokens_of(run_all(engine)["batched"]) == alone
    engine.add_request(PROMPTS[1], sampled(7), "other")
    assert tokens_of(run_all(engine)["other"]) != alone


def test_without_a_generator_torch_manual_seed_decides() -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(generate(make_engine()[0], PROMPTS[:2], do_sample=True))
    assert results[0] == results[1]


def test_sampling_has_the_distribution_of_the_scores() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    generator = torch.Generator().manual_seed(0)
    draws = draw(logits.softmax(-1).expand(2000, 4).contiguous(), generator)[:, 0]
    counts = torch.bincount(draws, minlength=4).double()
    expected = logits[0].double().softmax(-1) * 2000
    assert counts[3] == 0
    chi_square = float(((counts - expected)[:3] ** 2 / expected[:3]).sum())
    assert chi_square < 13.8  # two degrees of freedom, p = 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [2, 272, 50_000])
def test_draws_are_those_of_multinomial(dtype: torch.dtype, vocabulary: int) -> None:
    """Bit for bit, and the generator is left in the same state: seeds keep their tokens."""
    ours, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(20):
        probs = torch.randn(1, vocabulary, dtype=dtype).mul(3).softmax(-1)
        assert torch.equal(draw(probs, ours), torch.multinomial(probs, 1, generator=own))
        assert torch.equal(ours.get_state(), own.get_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_float32_or_float64(dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.dtype)
        return scores

    request = Request("a", greedy(1, processor=note), [1], RequestMetrics(prompt_tokens=1), added_at=0.0)
    logits = torch.zeros(1, 4, dtype=dtype)
    drawn = largest(logits)
    choose(drawn, logits, [request])
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert (seen, drawn.logprobs.dtype) == ([wanted], wanted)


# ---------------------------------------------------------------------- metrics


def keys(site: FakeSite, length: int, sparse: bool, retention: Retention) -> int:
    visible = min(length, site.window) if site.window else length
    return site.heads * (retention.count(length) if sparse and site.kind == "consume" else visible)


@pytest.mark.parametrize("retention", [Retention(3, 10), Retention(1, 10)])
def test_keys_read_is_the_sum_over_sites_and_rows(retention: Retention) -> None:
    sites = tuple(replace(site, retention=retention) for site in SITES)
    engine, _ = make_engine(retention=retention, sites=sites)
    name = engine.add_request(PROMPTS[1], greedy(4))
    (*_, last) = run_all(engine)[name]
    prompt = sum(keys(site, n, False, retention) for n in range(1, 8) for site in SITES)
    read = sum(keys(site, n, True, retention) for n in range(8, 11) for site in SITES)
    dense = sum(keys(site, n, False, retention) for n in range(8, 11) for site in SITES)
    metrics = engine.metrics(name)
    assert last.metrics is metrics
    assert (metrics.keys_read, metrics.keys_dense) == (prompt + read, prompt + dense)
    assert (metrics.decode_keys_read, metrics.decode_keys_dense) == (read, dense)
    assert (metrics.prompt_tokens, metrics.new_tokens, metrics.loops_run) == (7, 4, 3 * 10)


def test_full_retention_reads_what_dense_reads() -> None:
    everything = Retention(1, 1)
    sites = tuple(replace(site, retention=everything) for site in SITES)
    for options in ({"retention": everything, "sites": sites}, {"sparse": False}):
        engine, _ = make_engine(**options)
        name = engine.add_request(PROMPTS[1], greedy(4))
        run_all(engine)
        metrics = engine.metrics(name)
        assert metrics.keys_read == metrics.keys_dense > 0


def test_windows_of_prefix_rows() -> None:
    engine, _ = make_engine(sites=(FakeSite("dense", heads=1, window=2),))
    name = engine.add_request([1, 2, 3, 4, 5], greedy(1, prefix_length=4))
    run_all(engine)
    # keys >= position - 1, below the visible length: 4, 4, 3, 2 of the prefix, then 2
    assert engine.metrics(name).keys_read == 4 + 4 + 3 + 2 + 2


def test_time_per_token_is_the_mean_after_the_first() -> None:
    request = Request("a", greedy(9), [1, 2], RequestMetrics(prompt_tokens=2), added_at=10.0)
    for now in (11.5, 12.0, 14.5):
        request.append(7, now)
    assert request.metrics.time_to_first_token_s == 1.5
    assert request.metrics.time_per_token_s == 1.5


def test_times_are_measured() -> None:
    engine, _ = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(3))
    assert engine.metrics(name).time_to_first_token_s is None
    engine.step()
    first = engine.metrics(name).time_to_first_token_s
    assert first is not None
    assert first > 0
    assert engine.metrics(name).time_per_token_s is None
    run_all(engine)
    per_token = engine.metrics(name).time_per_token_s
    assert per_token is not None
    assert per_token > 0
    assert engine.metrics(name).time_to_first_token_s == first


def test_metrics_of_an_unknown_request() -> None:
    with pytest.raises(KeyError, match="no request 'x'"):
        make_engine()[0].metrics("x")
