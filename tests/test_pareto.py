"""A front holds exactly what nothing else beats."""

from __future__ import annotations

import pytest
from test_curves import made

from kvcompress.report.pareto import Point, draw_pareto, front, points


def at(*pairs):
    return [Point(cost, score, {"name": f"{cost}-{score}"}) for cost, score in pairs]


def test_a_front_rises_with_cost_and_leaves_out_what_costs_more_for_no_more():
    found = at((3, 0.5), (1, 0.2), (2, 0.1), (4, 0.5), (5, 0.9), (1, 0.1))
    assert [point[:2] for point in front(found)] == [(1, 0.2), (3, 0.5), (5, 0.9)]


@pytest.mark.parametrize("seed", range(5))
def test_a_front_equals_the_definition_point_by_point(seed):
    import random

    draw = random.Random(seed)
    found = at(*((draw.randint(1, 6), draw.randint(0, 4) / 4) for _ in range(30)))
    beaten = [any(o.cost <= p.cost and o.score >= p.score and o[:2] != p[:2] for o in found) for p in found]
    expected = sorted(p[:2] for p, out in zip(found, beaten, strict=True) if not out)
    assert sorted(p[:2] for p in front(found)) == expected


def test_only_runs_that_count_and_have_the_cost_are_points():
    records = [
        made("snap", 0.5, **{"kv.bytes_held": 10}),
        made("snap", 0.1, **{"kv.bytes_held": None}),
        made("ada", 0.5, status="failed", **{"kv.bytes_held": 5}),
        made("ada", 0.1, **{"kv.bytes_held": 0}),
    ]
    assert [point[:2] for point in points(records, "kv.bytes_held")] == [(10.0, 0.5)]


def test_a_figure_is_drawn_where_two_runs_have_a_cost(tmp_path):
    records = [made("full", 1.0, **{"kv.bytes_held": 100}), made("snap", 0.5, **{"kv.bytes_held": 50})]
    assert draw_pareto(records, "title", tmp_path / "a" / "pareto.png")
    assert (tmp_path / "a" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a" / "pareto.svg").read_text()
    assert not draw_pareto(records[:1], "title", tmp_path / "b.png") and not (tmp_path / "b.png").exists()
