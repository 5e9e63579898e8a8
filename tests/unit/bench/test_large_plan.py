"""The computed cost of an update of a large model, and the page that shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.large_plan import BUCKET_BYTES, EXAMPLES, GB, Deployment, Speeds, cost, table
from tests.support.paths import ROOT

SPEEDS = Speeds()


def test_the_plan_of_one_rank_has_the_numbers_computed_by_hand() -> None:
    """8 GB over a link of 50 GB/s, by hand."""
    found = cost(Deployment(4e9, 2, hosts=1, ranks=1), SPEEDS)
    assert found.staged == found.staged_per_rank == found.sent_star == found.sent_relay == 8 * GB
    assert found.receive_star_s == found.receive_relay_s == pytest.approx(0.16)
    assert found.load_s == pytest.approx(0.16)
    assert found.verify_s == pytest.approx((8 / 19.3 + 8 / 32.2) / 8)


def test_ranks_take_no_memory_and_shorten_the_load() -> None:
    one = Deployment(70e9, 2, hosts=4, ranks=1)
    few, many = cost(one, SPEEDS), cost(replace(one, ranks=8), SPEEDS)
    assert (many.staged, many.sent_star) == (few.staged, few.sent_star)
    assert many.staged_per_rank == 8 * few.staged_per_rank
    assert many.load_s == pytest.approx(few.load_s / 8)


@pytest.mark.parametrize("hosts", [1, 2, 8, 64])
def test_a_relay_is_never_slower(hosts: int) -> None:
    one = Deployment(70e9, 2, hosts=hosts, ranks=8)
    found = cost(one, SPEEDS)
    assert found.receive_star_s == pytest.approx(hosts * one.nbytes / SPEEDS.link)
    late = (hosts - 1) * BUCKET_BYTES / SPEEDS.link
    assert found.receive_relay_s == pytest.approx(one.nbytes / SPEEDS.link + late)
    assert found.sent_star == hosts * found.sent_relay
    sources = cost(replace(one, trainer_links=2 * hosts), SPEEDS)
    assert sources.receive_star_s == pytest.approx(one.nbytes / SPEEDS.link), "a host's own link is the limit"


def test_a_delta_moves_less_and_stages_as_much() -> None:
    one = Deployment(70e9, 2, hosts=8, ranks=8)
    whole, delta = cost(one, SPEEDS), cost(replace(one, changed=0.02), SPEEDS)
    assert delta.sent_relay == pytest.approx(0.02 * whole.sent_relay)
    assert (delta.staged, delta.load_s) == (whole.staged, whole.load_s)


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "large-models.md").read_text()
    assert table(SPEEDS) in page
    assert len(EXAMPLES) == table(SPEEDS).count("\n") - 1
