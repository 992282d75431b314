"""Money: exact, never too little, and `None` where a price is not known."""

import json
import pickle
import subprocess
import sys
import time as system_time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_DOWN, Context, Decimal, localcontext
from fractions import Fraction
from importlib.metadata import version

import genai_prices
import pytest
from genai_prices import data, types
from hypothesis import given
from hypothesis import strategies as st

from budgetguard_core.clock import SystemClock
from budgetguard_core.errors import ConfigurationError
from budgetguard_core.pricing import (
    FEMTO_USD_PER_USD,
    Price,
    PriceBook,
    from_usd,
    shared_prices,
    to_usd,
)
from budgetguard_core.usage import TokenUsage, check_token_usage

DAY = date(2026, 6, 1)
MILLION = 10**6


@pytest.fixture(scope="module")
def book():
    return PriceBook(as_of=DAY)


def usd(rates, **tokens):
    return to_usd(rates.cost(TokenUsage(**tokens)))


def rates_of(price, name="own-model"):
    return PriceBook({name: price}).rates_for(name)


# --- the unit -------------------------------------------------------------------------------


@given(st.integers(min_value=-(10**40), max_value=10**40))
def test_dollars_and_units_are_inverse_under_any_context(amount):
    with localcontext(Context(prec=3, rounding=ROUND_DOWN)):
        assert from_usd(to_usd(amount)) == amount
        assert Fraction(to_usd(amount)) == Fraction(amount, FEMTO_USD_PER_USD)


def test_dollars_below_the_unit_are_rounded_up():
    assert from_usd(Decimal("1E-16")) == 1
    assert from_usd(Decimal("0.1000000000000001")) == 10**14 + 1


# --- what a call costs ----------------------------------------------------------------------

FULL = Price(
    input=Decimal(3),
    output=Decimal(15),
    cache_read=Decimal("0.30"),
    cache_write=Decimal("3.75"),
    cache_write_1h=Decimal(6),
    per_request=Decimal("0.01"),
)


def test_every_bucket_has_its_own_rate_and_none_is_billed_twice():
    cost = usd(
        rates_of(FULL),
        input_tokens=10_000,
        cache_read_tokens=4_000,
        cache_write_tokens=3_000,
        cache_write_1h_tokens=1_000,
        output_tokens=500,
        reasoning_tokens=400,
    )
    plain, reads, five_minutes, one_hour = 3_000, 4_000, 2_000, 1_000
    expected = (
        plain * Decimal(3)
        + reads * Decimal("0.30")
        + five_minutes * Decimal("3.75")
        + one_hour * Decimal(6)
        + 500 * Decimal(15)
    ) / MILLION + Decimal("0.01")
    assert cost == expected


def test_a_rate_that_is_left_out_is_the_full_input_rate():
    rates = rates_of(Price(input=2, output=8))
    for bucket in (
        {"cache_read_tokens": MILLION},
        {"cache_write_tokens": MILLION},
        {"cache_write_tokens": MILLION, "cache_write_1h_tokens": MILLION},
    ):
        assert usd(rates, input_tokens=MILLION, **bucket) == 2


def test_one_hour_writes_without_a_rate_cost_no_less_than_other_writes():
    rates = rates_of(Price(input=2, output=8, cache_write=Decimal("2.50")))
    hour = {"cache_write_tokens": MILLION, "cache_write_1h_tokens": MILLION}
    assert usd(rates, input_tokens=MILLION, **hour) == Decimal("2.50")


def test_missing_write_rates_of_claude_follow_anthropics_multiples():
    rates = rates_of(Price(input=4, output=20), name="my-Claude")
    writes = {"input_tokens": MILLION, "cache_write_tokens": MILLION}
    assert usd(rates, **writes) == Decimal(4) * Decimal("1.25")
    assert usd(rates, **writes, cache_write_1h_tokens=MILLION) == Decimal(4) * 2


def test_a_price_per_request_is_charged_even_without_tokens():
    rates = rates_of(Price(input=0, output=0, per_request=Decimal("0.005")))
    assert usd(rates) == Decimal("0.005")
    assert to_usd(rates.input_cost(0)) == Decimal("0.005")
    assert rates.output_cost(10) == 0


# --- tiers ----------------------------------------------------------------------------------

TIERED = Price(
    input=Decimal("1.25"),
    output=10,
    tiers=[
        (200_000, Price(input=Decimal("2.50"), output=15)),
        (500_000, Price(input=Decimal("2"), output=30)),
    ],
)


@pytest.mark.parametrize(
    ("tokens", "input_rate", "output_rate"),
    [
        (199_999, "1.25", 10),
        (200_000, "1.25", 10),
        (200_001, "2.50", 15),
        (500_000, "2.50", 15),
        (500_001, "2", 30),
    ],
)
def test_the_tier_changes_right_above_its_threshold_for_all_tokens(tokens, input_rate, output_rate):
    cost = usd(rates_of(TIERED), input_tokens=tokens, output_tokens=7)
    assert cost == (tokens * Decimal(input_rate) + 7 * Decimal(output_rate)) / MILLION


def test_cached_tokens_count_towards_the_threshold():
    price = Price(
        input=1,
        output=1,
        cache_read=Decimal("0.1"),
        tiers=((100, Price(input=2, output=2, cache_read=Decimal("0.2"))),),
    )
    cost = usd(rates_of(price), input_tokens=101, cache_read_tokens=101)
    assert cost == 101 * Decimal("0.2") / MILLION


def test_a_projection_takes_the_dearest_tier_within_reach():
    rates = rates_of(TIERED)
    assert rates.input_cost(200_000) == from_usd(200_000 * Decimal("1.25") / MILLION)
    assert rates.input_cost(200_001) == from_usd(200_001 * Decimal("2.50") / MILLION)
    # The highest tier is cheaper, but a shorter call at the dearer rate is still possible.
    assert rates.input_cost(600_000) == from_usd(600_000 * Decimal("2.50") / MILLION)
    assert rates.output_cost(MILLION) == from_usd(Decimal(30))
    assert rates.output_cost(MILLION, input_tokens=200_000) == from_usd(Decimal(10))
    assert rates.output_cost(MILLION, input_tokens=200_001) == from_usd(Decimal(15))


def test_a_projection_allows_for_cache_writes():
    assert rates_of(FULL).input_cost(MILLION) == from_usd(Decimal(6) + Decimal("0.01"))


# --- properties -----------------------------------------------------------------------------

rate = st.integers(0, 10**12).map(lambda nano: Decimal(nano).scaleb(-9))
flat = st.builds(
    Price,
    input=rate,
    output=rate,
    cache_read=rate,
    cache_write=rate,
    cache_write_1h=rate,
    per_request=rate,
)


@st.composite
def prices(draw):
    price = draw(flat)
    thresholds = sorted(draw(st.sets(st.integers(1, 3_000), max_size=3)))
    return Price(
        input=price.input,
        output=price.output,
        cache_read=price.cache_read,
        cache_write=price.cache_write,
        cache_write_1h=price.cache_write_1h,
        per_request=price.per_request,
        tiers=[(threshold, draw(flat)) for threshold in thresholds],
    )


@st.composite
def usages(draw):
    plain, reads, five_minutes, one_hour, output = draw(st.tuples(*[st.integers(0, 1_000)] * 5))
    usage = TokenUsage(
        input_tokens=plain + reads + five_minutes + one_hour,
        output_tokens=output,
        cache_read_tokens=reads,
        cache_write_tokens=five_minutes + one_hour,
        cache_write_1h_tokens=one_hour,
        reasoning_tokens=draw(st.integers(0, output)),
    )
    check_token_usage(usage)
    return usage


def naive_cost(price, usage):
    """The bill as one would write it down, in exact fractions of a dollar."""
    for threshold, tier in price.tiers[::-1]:
        if usage.input_tokens > threshold:
            price = tier
            break
    plain = usage.input_tokens - usage.cache_read_tokens - usage.cache_write_tokens
    return (
        plain * Fraction(price.input)
        + usage.cache_read_tokens * Fraction(price.cache_read)
        + (usage.cache_write_tokens - usage.cache_write_1h_tokens) * Fraction(price.cache_write)
        + usage.cache_write_1h_tokens * Fraction(price.cache_write_1h)
        + usage.output_tokens * Fraction(price.output)
    ) / MILLION + Fraction(price.per_request)


@given(prices(), usages())
def test_cost_is_the_naive_bill_and_no_context_changes_it(price, usage):
    with localcontext(Context(prec=3, rounding=ROUND_DOWN)):
        again = rates_of(price).cost(usage)
    cost = rates_of(price).cost(usage)
    assert cost == again
    assert Fraction(cost, FEMTO_USD_PER_USD) == naive_cost(price, usage)


@given(prices(), usages(), st.integers(0, 2_000), st.integers(0, 2_000))
def test_no_call_within_a_projection_costs_more_than_it(price, usage, more_input, more_output):
    rates = rates_of(price)
    input_tokens = usage.input_tokens + more_input
    bound = rates.input_cost(input_tokens)
    output = usage.output_tokens + more_output
    known = rates.output_cost(output, input_tokens=input_tokens)
    assert rates.projected_cost(input_tokens, output) == bound + known
    assert rates.cost(usage) <= bound + known <= bound + rates.output_cost(output)


@given(flat, usages(), st.sampled_from(["plain", "read", "write", "write_1h", "output"]))
def test_more_tokens_never_cost_less(price, usage, bucket):
    parts = {
        "plain": ("input_tokens",),
        "read": ("input_tokens", "cache_read_tokens"),
        "write": ("input_tokens", "cache_write_tokens"),
        "write_1h": ("input_tokens", "cache_write_tokens", "cache_write_1h_tokens"),
        "output": ("output_tokens",),
    }[bucket]
    more = usage._replace(**{part: getattr(usage, part) + 1 for part in parts})
    rates = rates_of(price)
    assert rates.cost(more) >= rates.cost(usage)


# --- prices of one's own --------------------------------------------------------------------


def test_a_price_is_frozen_hashable_and_picklable():
    with pytest.raises(ValueError, match="frozen"):
        FULL.input = Decimal(0)
    assert pickle.loads(pickle.dumps(TIERED)) == TIERED
    assert len({TIERED, FULL, TIERED}) == 2


@pytest.mark.parametrize("field", ["input", "cache_read", "per_request"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "must be a Decimal, an int or a float, got True"),
        ("2.50", "must be a Decimal, an int or a float, got '2.50'"),
        (-1, "must be between 0 and 1000000 US dollars, got -1"),
        (float("nan"), "between 0 and 1000000 US dollars, got nan"),
        (Decimal("sNaN"), "between 0 and 1000000 US dollars, got sNaN"),
        (float("inf"), "between 0 and 1000000 US dollars, got inf"),
        (Decimal("1E+999999"), "between 0 and 1000000 US dollars"),
        (Decimal("0.1234567890123456"), r"at most \d+ decimal places, got .*Round it up"),
        (Decimal("1E-999999"), "decimal places"),
        (Decimal("100000." + "1" * 40), "decimal places"),
    ],
)
def test_a_price_that_makes_no_sense_is_refused(field, value, message):
    with pytest.raises(ConfigurationError, match=f"^{field} .*{message}"):
        Price(**{"input": 1, "output": 1, field: value})


def test_nine_decimals_per_million_tokens_are_the_finest_rate():
    rates = rates_of(Price(input=Decimal("1E-9"), output=0))
    assert rates.cost(TokenUsage(input_tokens=1)) == 1
    with pytest.raises(ConfigurationError, match="input must have at most 9 decimal places"):
        Price(input=Decimal("1E-10"), output=0)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([(0, FULL)], "must be a whole number >= 1, got 0"),
        ([(200_000.0, FULL)], "must be a whole number >= 1, got 200000.0"),
        ([(2, FULL), (2, FULL)], "must have thresholds that rise, got 2 after 2"),
        ([(1, TIERED)], "without tiers of their own"),
        ([(1, 5)], "must be a Price"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(tiers, message):
    with pytest.raises(ConfigurationError, match=message):
        Price(input=1, output=1, tiers=tiers)


@pytest.mark.parametrize("window", [0, -1, True, 2.5, "8192"])
def test_a_context_window_is_a_positive_whole_number(window):
    with pytest.raises(ConfigurationError, match="context_window must be a whole number"):
        Price(input=1, output=1, context_window=window)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"": FULL}, "model name in overrides"),
        ({7: FULL}, "model name in overrides"),
        ({"x" * 513: FULL}, "model name in overrides"),
        ({"gpt-4o": 2.5}, r"overrides\['gpt-4o'\] must be a Price, got 2.5"),
    ],
)
def test_overrides_that_make_no_sense_are_refused(overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        PriceBook(overrides)


def test_an_override_wins_whole_and_for_its_exact_name_only():
    book = PriceBook({"gpt-4o": Price(input=1, output=1, context_window=99)}, as_of=DAY)
    own = book.rates_for("gpt-4o", "openai")
    assert usd(own, input_tokens=MILLION, cache_read_tokens=MILLION) == 1
    assert own.context_window == 99
    assert usd(book.rates_for("gpt-4o-mini"), input_tokens=MILLION) == Decimal("0.15")
    assert usd(book.rates_for("gpt-4o-2024-08-06"), input_tokens=MILLION) == Decimal("2.5")
    assert PriceBook({"local": FULL}).rates_for("local").context_window is None


def test_changing_the_mapping_later_changes_nothing():
    overrides = {"local": FULL}
    book = PriceBook(overrides)
    overrides.clear()
    assert book.rates_for("local") is not None


# --- prices of genai-prices -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "provider", "input_rate", "output_rate"),
    [
        ("gpt-4o", None, "2.5", "10"),
        ("GPT-4o", None, "2.5", "10"),
        ("gpt-4o", "openai", "2.5", "10"),
        ("gpt-4o", "azure", "2.5", "10"),
        ("gpt-4o-2024-08-06", None, "2.5", "10"),
        ("gpt-4o-mini", None, "0.15", "0.6"),
        ("gpt-4o-mini-2024-07-18", "openai", "0.15", "0.6"),
        ("o1-pro", None, "150", "600"),
        ("o1-pro-2025-03-19", None, "150", "600"),
        ("gpt-4", None, "30", "60"),
        ("openai/gpt-4o", None, "2.5", "10"),
        ("openai/gpt-4o", "litellm", "2.5", "10"),
        ("openai:gpt-4o-mini", None, "0.15", "0.6"),
        ("openrouter/openai/gpt-4o", None, "2.5", "10"),
        ("azure/gpt-4o", None, "2.5", "10"),
        ("claude-sonnet-4-5-20250929", "anthropic", "3", "15"),
        ("anthropic/claude-sonnet-4-5", None, "3", "15"),
        ("anthropic:claude-sonnet-4-5", None, "3", "15"),
        ("anthropic.claude-sonnet-4-20250514-v1:0", None, "3", "15"),
        ("us.anthropic.claude-sonnet-4-20250514-v1:0", None, "3", "15"),
        ("us.anthropic.claude-sonnet-4-20250514-v1:0", "amazon_bedrock", "3", "15"),
        ("bedrock/us.anthropic.claude-sonnet-4-20250514-v1:0", None, "3", "15"),
        ("bedrock_converse:us.anthropic.claude-sonnet-4-20250514-v1:0", None, "3", "15"),
        (
            "arn:aws:bedrock:us-east-1:123456789012:inference-profile/"
            "us.anthropic.claude-sonnet-4-20250514-v1:0",
            None,
            "3",
            "15",
        ),
        ("us.amazon.nova-pro-v1:0", None, "0.8", "3.2"),
        ("models/gemini-2.5-pro", "google_genai", "1.25", "10"),
        ("google_genai:gemini-2.5-pro", None, "1.25", "10"),
        ("ft:gpt-4o-mini-2024-07-18:org:name:id", None, "0.3", "1.2"),
    ],
)
def test_a_name_gets_the_price_of_its_own_model(book, model, provider, input_rate, output_rate):
    rates = book.rates_for(model, provider)
    assert usd(rates, input_tokens=1_000) == 1_000 * Decimal(input_rate) / MILLION
    assert usd(rates, output_tokens=1_000) == 1_000 * Decimal(output_rate) / MILLION


@pytest.mark.parametrize(
    ("model", "provider"),
    [
        ("", None),
        ("no-such-model", None),
        ("gpt-4o-no-such-variant", None),
        ("gpt-4o@flex", None),
        ("my-gpt-4o", None),
        ("openai/no-such-model", None),
        ("no-such-provider/gpt-4o", None),
        ("gpt-4o", "ollama"),
        ("claude-sonnet-4-5", "openai"),
        ("anthropic.no-such-model", None),
        ("ft:gpt-4.1-2025-04-14:org::id", None),
        # Listed without any rate, which is not the same as free.
        ("mai-ds-r1:free", "azure"),
        ("gpt-4o\n", None),
        ("gpt-4o" + "x" * 600, None),
        ("gpt-4o", "openai" * 100),
    ],
)
def test_an_unknown_price_is_none(book, model, provider):
    assert book.rates_for(model, provider) is None


def test_claude_cache_rates(book):
    rates = book.rates_for("claude-sonnet-4-5")
    tokens = {"input_tokens": 1_000}
    assert usd(rates, **tokens, cache_read_tokens=1_000) == Decimal("0.0003")
    assert usd(rates, **tokens, cache_write_tokens=1_000) == Decimal("0.00375")
    hour = {"cache_write_tokens": 1_000, "cache_write_1h_tokens": 1_000}
    assert usd(rates, **tokens, **hour) == Decimal("0.006")


def test_the_context_window_is_known_where_the_data_has_it(book):
    assert book.rates_for("gpt-4o").context_window == 128_000
    assert book.rates_for("mistral-large-latest").context_window is None


def test_a_price_per_thousand_requests_becomes_one_per_request(book):
    assert usd(book.rates_for("sonar", "perplexity")) == Decimal("0.012")


def test_a_model_without_output_price_is_not_free(book):
    rates = book.rates_for("text-embedding-3-small", "openai")
    assert usd(rates, input_tokens=MILLION) == Decimal("0.02")
    assert usd(rates, output_tokens=MILLION) == Decimal("0.02")


@pytest.mark.parametrize(
    ("day", "long_call"),
    [(date(2026, 3, 12), Decimal(10)), (date(2026, 3, 13), Decimal(5))],
)
def test_a_price_that_changed_holds_from_its_day(day, long_call):
    rates = PriceBook(as_of=day).rates_for("claude-opus-4-6")
    assert usd(rates, input_tokens=MILLION) == long_call


def test_where_hours_differ_in_price_the_dearest_counts(book):
    peak, output_peak = Decimal("0.27"), Decimal("1.1")
    rates = book.rates_for("deepseek-chat")
    assert usd(rates, input_tokens=MILLION) == peak
    assert usd(rates, output_tokens=MILLION) == output_peak


@pytest.fixture
def listed(monkeypatch):
    """Prices written down as genai-prices would list them, for the one model of one provider."""

    def rates(prices, name="m"):
        monkeypatch.setattr(data, "providers", [provider_of("acme", prices, name)])
        return PriceBook(as_of=DAY).rates_for(name, "acme")

    return rates


def provider_of(name, prices, *models, **settings):
    return types.Provider(
        id=name,
        name=name,
        api_pattern=name,
        models=[
            types.ModelInfo(id=model, match=types.ClauseEquals(model), prices=prices)
            for model in models
        ],
        **settings,
    )


def model_price(**rates):
    return types.ModelPrice(**{f"{name}_mtok": rate for name, rate in rates.items()})


def tiered(base, *tiers):
    return types.TieredPrices(
        base=Decimal(base), tiers=[types.Tier(start, Decimal(price)) for start, price in tiers]
    )


def test_prices_that_all_start_later_fall_back_to_the_first(listed):
    def priced(constraint, rate):
        return types.ConditionalPrice(constraint, prices=model_price(input=Decimal(rate)))

    rates = listed(
        [
            priced(types.StartDateConstraint(date(2030, 1, 1)), 1),
            priced(types.StartDateConstraint(date(2031, 1, 1)), 9),
            priced(types.TimeOfDateConstraint(time(1), time(2)), 3),
        ]
    )
    assert usd(rates, input_tokens=MILLION) == 3


@pytest.mark.parametrize(
    ("name", "listed_rates", "write_rate", "hour_rate"),
    [
        ("m", {}, "4", "4"),
        ("m", {"cache_write": 5}, "5", "5"),
        ("my-claude-m", {}, "5", "8"),
        ("my-claude-m", {"cache_write": 9}, "9", "9"),
        ("m", {"cache_write": 5, "cache_write_1h": 3}, "5", "3"),
        ("my-claude-m", {"cache_write": 5, "cache_write_1h": 3}, "5", "3"),
    ],
)
def test_write_rates_are_the_listed_ones_or_those_of_the_models_kind(
    listed, name, listed_rates, write_rate, hour_rate
):
    exact = {kind: Decimal(rate) for kind, rate in listed_rates.items()}
    rates = listed(model_price(input=Decimal(4), output=Decimal(20), **exact), name)
    writes = {"input_tokens": MILLION, "cache_write_tokens": MILLION}
    assert usd(rates, **writes) == Decimal(write_rate)
    assert usd(rates, **writes, cache_write_1h_tokens=MILLION) == Decimal(hour_rate)


def test_a_name_without_a_provider_is_looked_for_where_it_belongs(monkeypatch):
    price = model_price(input=Decimal(1), output=Decimal(1))
    starts = types.ClauseStartsWith
    providers = [
        provider_of("openai", price, "ft:tuned", "other"),
        provider_of("aws", price, "us.maker.model", "plain"),
        provider_of(
            "reseller", price, model_match=starts("sold-"), fallback_model_providers=["maker"]
        ),
        provider_of("maker", price, "sold-model"),
    ]
    monkeypatch.setattr(data, "providers", providers)
    book = PriceBook(as_of=DAY)
    for found in "ft:tuned", "us.maker.model", "sold-model", "aws/plain", "maker:sold-model":
        assert book.rates_for(found) is not None, found
    for unknown in "ft:other", "other", "plain", "sold-other", "openai", "openai/", "maker:":
        assert book.rates_for(unknown) is None, unknown


def test_buckets_may_have_thresholds_of_their_own(listed):
    rates = listed(
        model_price(
            input=tiered(1, (300_000, 3), (272_000, 2)),
            output=tiered(10, (8, 30), (200_000, 20), (128_000, 40)),
        )
    )
    for tokens, input_rate, output_rate in [
        (8, 1, 10),
        (9, 1, 30),
        (128_001, 1, 40),
        (200_001, 1, 20),
        (272_001, 2, 20),
        (300_000, 2, 20),
        (300_001, 3, 20),
    ]:
        cost = usd(rates, input_tokens=tokens, output_tokens=5)
        assert cost == Decimal(tokens * input_rate + 5 * output_rate) / MILLION
    assert rates.output_cost(MILLION, input_tokens=300_000) == from_usd(Decimal(40))


def test_a_rate_finer_than_the_unit_is_rounded_up(book):
    # genai-prices 0.2.3 lists this cache write as a long binary fraction of a dollar.
    from genai_prices.data import providers

    openrouter = next(each for each in providers if each.id == "openrouter")
    fine = [
        (model.id, model.prices.cache_write_mtok)
        for model in openrouter.models
        if isinstance(getattr(getattr(model, "prices", None), "cache_write_mtok", None), Decimal)
        and model.prices.cache_write_mtok.as_tuple().exponent < -9
    ]
    assert fine
    for name, listed in fine:
        rates = book.rates_for(name, "openrouter")
        one = rates.cost(TokenUsage(input_tokens=1, cache_write_tokens=1))
        exact = Fraction(listed) * FEMTO_USD_PER_USD / MILLION
        assert exact < one < exact + 1


def test_common_models_cost_what_genai_prices_says(book):
    # One moment of the day that the book is made for.
    noon = datetime(DAY.year, DAY.month, DAY.day, 12, tzinfo=UTC)
    usage = TokenUsage(
        input_tokens=250_001, cache_read_tokens=60_000, cache_write_tokens=9_000, output_tokens=777
    )
    for model, provider in [
        ("gpt-4o", "openai"),
        ("o3", "openai"),
        ("claude-sonnet-4-5", "anthropic"),
        ("claude-haiku-4-5", "anthropic"),
        ("gemini-2.5-pro", "google"),
        ("mistral-large-latest", "mistral"),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", "aws"),
    ]:
        theirs = genai_prices.calc_price(
            genai_prices.Usage(
                input_tokens=usage.input_tokens,
                cache_read_tokens=usage.cache_read_tokens,
                cache_write_tokens=usage.cache_write_tokens,
                output_tokens=usage.output_tokens,
            ),
            model,
            provider_id=provider,
            genai_request_timestamp=noon,
        )
        assert to_usd(book.rates_for(model, provider).cost(usage)) == theirs.total_price


def test_every_model_of_the_data_is_priced_or_unknown_but_never_free(book):
    from genai_prices.data import providers

    priced = 0
    for provider in providers:
        for model in provider.models:
            rates = book.rates_for(model.id, provider.id)
            if rates is not None:
                priced += 1
                assert rates.cost(TokenUsage(input_tokens=MILLION)) > 0
    assert priced > 2_000


# --- the day --------------------------------------------------------------------------------


@pytest.fixture
def at(monkeypatch):
    """The machine's wall clock, to be set; the machine is where it is a day later already."""
    monkeypatch.setenv("TZ", "Etc/GMT-14")
    system_time.tzset()

    def moment(when):
        monkeypatch.setattr(
            SystemClock, "wall_ns", staticmethod(lambda: int(when.timestamp() * 10**9))
        )

    yield moment
    monkeypatch.undo()
    system_time.tzset()


def test_a_book_has_the_prices_of_the_day_on_which_it_is_made(at):
    at(datetime(2026, 3, 12, 23, 59, tzinfo=UTC))
    book = PriceBook()
    at(datetime(2026, 3, 13, tzinfo=UTC))
    assert (book.as_of, PriceBook().as_of) == (date(2026, 3, 12), date(2026, 3, 13))
    usage = {"input_tokens": MILLION}
    assert usd(book.rates_for("claude-opus-4-6"), **usage) == Decimal(10)
    assert usd(PriceBook().rates_for("claude-opus-4-6"), **usage) == Decimal(5)


def test_runs_share_the_book_of_their_day(at):
    noon = datetime(2026, 3, 12, 12, tzinfo=UTC)
    at(noon)
    book = shared_prices()
    assert (shared_prices(), book.as_of) == (book, noon.date())
    at(noon + timedelta(days=1))
    assert shared_prices().as_of == date(2026, 3, 13)


# --- memory, version, import ----------------------------------------------------------------


def test_rates_are_remembered_and_the_memory_is_bounded():
    fresh = PriceBook(as_of=DAY)
    assert fresh.rates_for("gpt-4o") is fresh.rates_for("gpt-4o")
    for number in range(3_000):
        assert fresh.rates_for(f"made-up-{number}") is None
    assert fresh._look_up.cache_info().currsize == 1_024


def test_names_of_any_length_are_answered_but_not_kept():
    fresh = PriceBook(as_of=DAY)
    assert fresh.rates_for("x" * MILLION) is None
    assert fresh.rates_for("gpt-4o", "x" * MILLION) is None
    assert fresh._look_up.cache_info().currsize == 0


def test_names_from_outside_leave_nothing_behind_in_genai_prices():
    from genai_prices import data_snapshot

    PriceBook().rates_for("gpt-made-up-by-a-model")
    assert "gpt-made-up-by-a-model" not in str(data_snapshot.get_snapshot()._provider_misses)
    assert "gpt-made-up-by-a-model" not in str(data_snapshot.get_snapshot()._provider_cache)


def test_threads_may_share_a_book():
    book = PriceBook(as_of=DAY)
    names = ["gpt-4o", "gpt-4o-mini", "no-such-model"] * 50
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(book.rates_for, names))
    assert [each is None for each in found] == [False, False, True] * 50


def test_the_version_names_the_data_and_the_overrides():
    source = f"genai-prices {version('genai-prices')}"
    assert PriceBook().version == source
    assert PriceBook({}).version == source
    own = PriceBook({"a": FULL, "b": TIERED})
    assert own.version.startswith(f"{source} + overrides ")
    assert PriceBook({"b": TIERED, "a": FULL}).version == own.version
    assert PriceBook({"a": FULL}).version != own.version
    short = Price(input=Decimal("2.5"), output=1)
    assert (
        PriceBook({"a": short}).version
        == PriceBook({"a": Price(input=Decimal("2.50"), output=1)}).version
        != PriceBook({"a": Price(input=Decimal("2.51"), output=1)}).version
    )


def test_genai_prices_is_imported_with_the_first_price_taken_from_it():
    code = """
import json, sys
from budgetguard_core.pricing import Price, PriceBook
seen = []
book = PriceBook({"own": Price(input=1, output=1)})
book.version
book.rates_for("own")
seen.append("genai_prices" in sys.modules)
book.rates_for("gpt-4o")
seen.append("genai_prices" in sys.modules)
print(json.dumps(seen))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [False, True]
