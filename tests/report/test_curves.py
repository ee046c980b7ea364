"""Figures over budgets: every finished run is a point at its measured bytes, methods keep apart, nothing is hidden."""

from __future__ import annotations

import pytest

from kvcompress.commands.report import main
from kvcompress.common import hashing
from kvcompress.report import curves, iso_bytes
from kvcompress.report.curves import by_budget, by_bytes, draw_curves
from kvcompress.report.run_index import gather as load
from kvcompress.report.series import by_family, family, series, spread
from kvcompress.report.styles import styles
from kvcompress.sweep import record, record_schema

BUDGETS = (1.0, 0.5, 0.1)
PARTS = {
    "full": ("none", "uniform", "never"),
    "snap": ("Snap", "uniform", "prompt"),
    "ada": ("Snap", "ada", "prompt"),
    "heavy": ("Heavy", "uniform", "prompt+every1"),
}


def made(method, budget, task="needle", **more):
    scorer, allocator, schedule = PARTS.get(method, ("S", "uniform", "prompt"))
    kl = None if task == "needle" else 1e-12 if budget == 1.0 else 0.2 / budget
    return dict.fromkeys(record_schema.KEYS) | {
        "run_id": hashing.digest([method, budget, task, more]),
        "status": "ok",
        "model": "tiny/model",
        "task": task,
        "method": method,
        "budget": budget,
        "seed": 0,
        "n_samples": 3,
        "score": budget,
        "metric": "m/1",
        "parts.scorer": scorer,
        "parts.allocator": allocator,
        "parts.schedule": schedule,
        "parts.codec": "plain",
        "parts.reader": "all",
        "parts.prefill": "oneshot",
        "parts.preset": "paper",
        "kv.ratio": budget + 0.03,
        "kv.bytes_peak": 2e7 * budget,
        "kv.bytes_mean": 1e7 * budget,
        "protocol.pair": task,
        "versions.source": hashing.source_hash(),
        **({} if kl is None else {"metrics.kl": kl, "metrics.curve_position": [0, 1], "metrics.curve_kl": [0.0, kl]}),
        **more,
    }


def group(task="needle", methods=("snap", "ada", "heavy")):
    return [made("full", 1.0, task), *(made(method, budget, task) for method in methods for budget in BUDGETS)]


def lines_of(figure):
    """Of each panel: label -> points of the line drawn in that label's colour, with that marker."""
    found = []
    for axes in figure.axes:
        names = {text.get_color(): text.get_text() for text in axes.texts if text.get_text().strip() != "full"}
        found.append(
            {
                names[line.get_color()]: list(zip(*line.get_data(), strict=True))
                for line in axes.lines
                if line.get_color() in names and len(line.get_xdata()) == len(BUDGETS)
            }
        )
    return found


def test_families_follow_from_the_parts_and_the_baseline_is_no_line():
    lines = series(group())
    assert [one.name for one in lines] == ["ada", "snap", "heavy"] or len({one.family for one in lines}) == 3
    assert {one.name: len(one.records) for one in lines} == dict.fromkeys(("snap", "ada", "heavy"), 3)
    assert "decode" in family(made("heavy", 0.5)) and "different shares" in family(made("ada", 0.5))
    assert "another form" in family(made("snap", 0.5, **{"parts.codec": "int8"}))


def test_a_large_family_is_parted_so_that_no_two_lines_of_a_panel_look_alike():
    lines = series(made(f"m{number}", budget) for number in range(18) for budget in BUDGETS)
    panels = by_family(lines)
    assert [len(members) for _, members in panels] == [6, 6, 6] and len(
        set(styles(one.name for one in lines).values())
    ) == 18
    assert [one.name for _, members in panels for one in members] == sorted(f"m{number}" for number in range(18))
    assert len({title for title, _ in panels}) == 3


def test_the_same_method_in_two_settings_is_two_lines_whose_names_say_the_difference():
    again = [made("snap", budget, **{"parts.allocator": "ada"}) for budget in BUDGETS]
    names = {one.name for one in series([*group(methods=("snap",)), *again])}
    assert names == {"snap uniform", "snap ada"}


def test_runs_that_a_record_cannot_tell_apart_are_not_joined():
    twice = [made("snap", budget, window=w) for budget in BUDGETS for w in (8, 32)]
    (one,) = series(twice)
    assert len(one.records) == 6 and not one.ordered and series(group())[0].ordered


def test_labels_keep_their_order_and_distance_and_stay_inside():
    wanted = [0.5, 0.5, 0.5, 1.0, 0.98, 0.0]
    places = spread(wanted, 0.1, 0.0, 1.0)
    pairs = sorted(zip(wanted, places, strict=True), key=lambda pair: pair[1])
    assert [w for w, _ in pairs] == sorted(wanted)
    assert all(b - a >= 0.1 - 1e-9 for (_, a), (_, b) in zip(pairs, pairs[1:], strict=False))
    assert min(places) >= 0.0 and max(places) <= 1.0
    crowded = spread([0.9] * 30, 0.1, 0.0, 1.0)
    assert min(crowded) >= -1e-9 and max(crowded) <= 1.0 and len(set(crowded)) == 30


def test_points_stand_at_the_bytes_measured_and_divergence_keeps_to_its_floor():
    figure = curves._figure([by_budget(group()), by_budget(group("fidelity"))], "t")
    found = lines_of(figure)
    assert len(found) == 6  # three families, two columns
    scores = {name: points for panel in found[0::2] for name, points in panel.items()}
    drifts = {name: points for panel in found[1::2] for name, points in panel.items()}
    assert set(scores) == set(drifts) == {"snap", "ada", "heavy"}
    assert scores["snap"] == [pytest.approx((b + 0.03, b)) for b in BUDGETS]
    floor = 0.1  # the decade below the smallest divergence of a run that evicts
    assert drifts["ada"] == [pytest.approx((b + 0.03, floor if b == 1.0 else 0.2 / b)) for b in BUDGETS]


def test_bytes_are_drawn_in_megabytes_with_the_others_behind():
    figure = curves._figure(by_bytes(group()), "t")
    peak, mean = lines_of(figure)[:2]
    (name,) = peak
    assert peak[name] == [pytest.approx((20 * b, b)) for b in BUDGETS]
    assert mean[name] == [pytest.approx((10 * b, b)) for b in BUDGETS]
    behind = [line for line in figure.axes[0].lines if line.get_color() == curves.CONTEXT]
    assert len(behind) == 2 and [line.get_xdata()[0] for line in behind] == pytest.approx([20, 20])


def write(folder, records):
    for one in records:
        run = record.RunFolder(folder, "slope", one["run_id"])
        run.open("")
        run.append({"id": "a", "score": one["score"], "out": {}})
        run.finish(one)


def test_the_report_writes_every_figure_as_png_and_svg_and_the_same_each_time(tmp_path):
    write(
        tmp_path / "r",
        [
            *group(methods=("snap",)),
            *group("fidelity", ("snap", "heavy")),
            made("snap", 0.2, status="failed", score=None),
        ],
    )
    assert main([str(tmp_path / "r"), "--png", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    stems = ("budget", "needle-needle-bytes", "fidelity-fidelity-bytes", "fidelity-fidelity-position")
    stems = (*(f"tiny_model-{stem}" for stem in stems), "needle-needle-pareto", "fidelity-fidelity-pareto")
    assert names == {f"slope-{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert before["slope-tiny_model-budget.png"][:4] == b"\x89PNG"
    fidelity = [entry for entry in load([tmp_path / "r"]).entries if entry.record["task"] == "fidelity"]
    again = {path.name: path.read_bytes() for path in draw_curves(fidelity, tmp_path / "again") if "bytes" in path.name}
    assert again and again == {name: before[name] for name in again}


def test_one_budget_draws_nothing_and_a_method_without_bytes_is_left_out(tmp_path):
    write(tmp_path / "one", [made("full", 1.0), made("snap", 0.5), made("ada", 0.5)])
    assert draw_curves(load([tmp_path / "one"]).entries, tmp_path / "out") == []
    older = [made("snap", b, **{"kv.bytes_peak": None, "kv.bytes_mean": None}) for b in BUDGETS]
    write(tmp_path / "old", older)
    assert [path.name for path in draw_curves(load([tmp_path / "old"]).entries, tmp_path / "out")] == [
        f"slope-tiny_model-budget.{kind}" for kind in ("png", "svg")
    ]


def test_a_codec_without_a_budget_is_one_point_among_the_lines(tmp_path):
    codec = made("int8", 1.0, "fidelity", **{"parts.codec": "int8", "parts.scorer": "none", "metrics.kl": 0.05})
    panel = by_budget([*group("fidelity"), codec])
    (one,) = [line for line in panel.lines if line.name == "int8"]
    assert panel.points(one) == [(1.03, 0.05, codec)] and "another form" in one.family
    assert curves.limits(panel)[0] == 0.01  # and counts where the axis begins


def coded(method, ratio, codec, scorer="none", budget=1.0, variant="", kl=0.05):
    parts = {"parts.codec": codec, "parts.scorer": scorer, "metrics.kl": kl, "kv.ratio": ratio, "variant": variant}
    return made(method, budget, "fidelity", **parts)


def test_settings_of_a_method_without_a_budget_are_one_line_by_what_they_hold():
    bits = [
        coded("kivi", ratio, "kivi", variant=variant)
        for ratio, variant in ((0.2, "bits=4"), (0.14, ""), (0.3, "bits=8"))
    ]
    (one,) = series([made("full", 1.0, "fidelity"), *bits])
    assert one.ordered and [record["kv.ratio"] for record in one.records] == [0.3, 0.2, 0.14]


def test_a_codec_on_the_full_cache_is_named_and_so_is_what_all_runs_of_a_line_have_in_common():
    bits = [coded("full", 0.2, "kivi", variant="codec=kivi codec.bits=4")]
    assert [one.name for one in series([made("full", 1.0, "fidelity"), *bits])] == ["full codec=kivi codec.bits=4"]
    bits.append(coded("full", 0.3, "kivi", variant="codec=kivi codec.bits=8"))
    assert [(one.name, len(one.records)) for one in series(bits)] == [("full codec=kivi", 2)]


def test_settings_that_share_budgets_are_lines_of_their_own():
    records = [
        coded("snap", budget * share, "kivi", "Snap", budget, variant)
        for budget in (0.5, 0.25)
        for share, variant in ((0.2, "codec=kivi"), (0.3, "codec=kivi codec.bits=4"))
    ]
    assert [(one.name, len(one.records), one.ordered) for one in series(records)] == [
        ("snap codec=kivi", 2, True),
        ("snap codec=kivi codec.bits=4", 2, True),
    ]


def test_all_families_stand_on_one_axis_of_bytes(tmp_path):
    records = [
        *group("fidelity", ("snap",)),
        coded("kivi", 0.2, "kivi"),
        coded("lowrank", 0.5, "lowrank", budget=0.5),
        coded("lowrank", 0.12, "lowrank", budget=0.12, variant="bits=4"),
        coded("snap", 0.1, "kivi", "Snap", 0.5),
    ]
    assert [iso_bytes.kind(record) for record in records[2:]] == [
        "eviction",
        "eviction",
        "quantisation",
        "low rank",
        "low rank and quantisation",
        "eviction and another form",
    ]
    write(tmp_path / "many", records)
    written = iso_bytes.draw_equal(load([tmp_path / "many"]).entries, tmp_path / "out")
    assert [path.name for path in written] == [f"slope-tiny_model-equal-bytes.{kind}" for kind in ("png", "svg")]
    write(tmp_path / "one", group("fidelity"))
    assert iso_bytes.draw_equal(load([tmp_path / "one"]).entries, tmp_path / "out") == [], (
        "eviction alone is no comparison"
    )


def test_every_run_of_the_equal_bytes_figure_is_a_point_at_what_it_holds():
    records = [*group("fidelity", ("snap",)), coded("kivi", 0.2, "kivi", kl=0.01)]
    (axes,) = iso_bytes._figure([iso_bytes._panel(records)], "t").axes
    points = {(round(float(x), 3), float(y)) for line in axes.lines for x, y in line.get_xydata()}
    for record_ in records[1:]:
        if record_["budget"] < 1.0 or record_["method"] == "kivi":
            assert (round(record_["kv.ratio"], 3), record_["metrics.kl"]) in points
