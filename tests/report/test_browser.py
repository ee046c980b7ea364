"""The page in a real browser, opened from disk with the network cut: what a person does with it works.

Needs the package playwright and a Chromium or Chrome: one named by KVCOMPRESS_BROWSER, or one on the PATH.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from boards import MB, run, sample

from kvcompress.commands.report import main
from kvcompress.report.page import write_page
from kvcompress.report.run_index import gather

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
EVIL = '</script><script>window.hit = 1</script><img src=x onerror="window.hit = 2">{dot|x}'
KEPT = {"kept_map": [100, 0, 50, 100], "kept_per_head": [[1, 2, 3], [4, 5, 6]], "kept_per_layer": [2.0, 5.0]}


def browser_path() -> str | None:
    named = os.environ.get("KVCOMPRESS_BROWSER")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    path = browser_path()
    if path is None:
        pytest.skip(f"no browser on the PATH ({', '.join(NAMES)}); KVCOMPRESS_BROWSER names another")
    # a browser's own sandbox refuses the superuser, whom containers often run as
    options = ["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=options)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def board(tmp_path_factory) -> Path:
    """Two settings of a needle task, a suite of two data sets, a failed run, a damaged record, a published number."""
    folder = tmp_path_factory.mktemp("board")
    results = folder / "results"
    for pair, question in (("p", "seen"), ("q", "hidden")):
        asked = {"protocol.question": question}
        run(results, "full", 1.0, [1.0] * 8, pair=pair, **asked)
        for budget, scores in ((0.5, [1.0] * 8), (0.25, [0.0, 1.0] * 4), (0.1, [0.0] * 8)):
            run(results, "beta", budget, scores, pair=pair, **asked)
        lost = [sample(f"s{i}", 0.0, f"answer {i}", depth=i / 7, kept=KEPT) for i in range(8)]
        run(results, "alpha", 0.25, lost, pair=pair, **asked, **{"parts.allocator": "ada", "time.tpot_s": None})
    run(results, "broken", 0.5, [], status="failed", score=None, n_samples=0, error="ValueError: no")
    for task, score in (("a", 1.0), ("b", 0.5)):
        run(results, "full", 1.0, [score], task=f"suite/{task}", pair=task)
    run(results, "beta", 0.5, [0.25], task="suite/a", pair="a")
    (results / "board" / "cut").mkdir()
    (results / "board" / "cut" / "record.json").write_text("{")
    foreign = [
        {
            "origin": "published",
            "model": "other",
            "task": "needle",
            "method": "Beta",
            "budget": 0.3,
            "score": 0.77,
            "source": "a paper",
        }
    ]
    return write_page(gather([results]), folder / "board.html", foreign).page


@pytest.fixture
def page(browser, request) -> Iterator:
    """A page with the network cut, whose errors fail the test."""
    with opened(browser) as found:
        yield found


class opened:
    """A tab without a network; what it complains about, and what it asks of a network, is an error at the end."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900}, **options)
        self.faults: list[str] = []

    def __enter__(self):
        page = self.context.new_page()
        page.on("console", lambda m: self.faults.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on(
            "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else self.faults.append(r.url)
        )
        return page

    def __exit__(self, kind, *rest):
        self.context.close()
        if kind is None:
            assert self.faults == []


def visit(page, path):
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")


def methods(page):
    return [text.removeprefix("▸").strip() for text in page.locator("#body .open").all_inner_texts()]


def column(page, key):
    return [text.splitlines()[0] for text in page.locator(f"#body .c-{key}").all_inner_texts()]


def option(page, card):
    """What a figure was given to draw."""
    page.locator(f"#card-{card}").scroll_into_view_if_needed()
    page.wait_for_selector(f"#card-{card} .plot svg")
    return page.evaluate(
        f"""() => {{ const o = KV.plots.live.get(document.querySelector('#card-{card} .plot')).getOption();
        return {{ x: o.xAxis[0], y: o.yAxis[0], series: o.series.map(s => ({{ name: s.name, type: s.type,
          data: (s.data || []).map(d => d.value ?? d) }})) }}; }}"""
    )


def test_the_table_shows_the_records_and_skipped_ones_are_named(page, board):
    visit(page, board)
    assert page.locator("#body tr").count() == 10 + 3
    assert "1 record was skipped" in page.locator("#skipped").inner_text()
    assert page.title() == "board · kvcompress"
    first = page.locator("#body tr").first
    assert "baseline" in first.inner_text() and "100.0%" in first.inner_text()


def test_a_click_on_a_column_sorts_by_it_and_missing_values_stay_last(page, board):
    visit(page, board)
    button = page.get_by_role("button", name="Per token")
    button.click()
    times = column(page, "tpot")
    assert page.locator("th[data-key=tpot]").get_attribute("aria-sort") == "ascending"
    known = [float(text.split()[0]) for text in times if text != "–"]
    assert known == sorted(known) and times[-2:] == ["–", "–"] and len(known) == len(times) - 2
    button.click()
    times = column(page, "tpot")
    assert page.locator("th[data-key=tpot]").get_attribute("aria-sort") == "descending"
    assert [float(text.split()[0]) for text in times[:-2]] == sorted(known, reverse=True) and times[-2:] == ["–", "–"]
    button.click()
    assert page.locator("[aria-sort]").count() == 0


def test_filters_and_search_leave_what_fits_and_reset_brings_all_back(page, board):
    visit(page, board)
    page.select_option("#f-method", "beta")
    page.select_option("#f-protocol", "question hidden")
    assert methods(page) == ["beta"] * 3 and "3 of " in page.locator("#count").inner_text()
    assert page.locator("#group option:checked").inner_text().endswith("question hidden")
    page.locator("#clear").click()
    page.select_option("#f-part", "allocator: ada")
    assert methods(page) == ["alpha"] * 2
    page.locator("#clear").click()
    page.fill("#search", "SUITE/a 0.5")
    assert methods(page) == ["beta"]
    page.fill("#search", "nothing like it")
    assert methods(page) == [] and page.locator("#count").inner_text().startswith("0 of ")
    page.locator("#clear").click()
    assert page.locator("#body tr").count() == 13


def test_failed_runs_and_numbers_of_others_are_shown_when_asked_for_and_greyed(page, board):
    visit(page, board)
    assert "broken" not in methods(page)
    page.select_option("#f-show", "all")
    assert {"broken", "Beta"} <= set(methods(page))
    assert page.locator("tr.foreign .c-score").inner_text() == "0.770"
    assert "published" in page.locator("tr.foreign .c-flags").inner_text()
    assert page.locator("tr.off .c-score").first.inner_text() == "–"


def test_a_difference_that_chance_does_not_explain_is_marked(page, board):
    visit(page, board)
    page.select_option("#f-protocol", "question seen")
    page.select_option("#f-task", "needle")
    cells = dict(zip(zip(methods(page), column(page, "budget"), strict=True), column(page, "delta"), strict=True))
    assert "✱" in cells["alpha", "0.25"] and "✱" in cells["beta", "0.1"] and "−1.000" in cells["beta", "0.1"]
    assert cells["beta", "0.25"] == "−0.500" and cells["beta", "0.5"] == "±0.000"


def test_details_link_to_the_record_and_give_the_command(page, board):
    visit(page, board)
    page.get_by_role("button", name="Details of alpha").first.click()
    detail = page.locator("tr.more .detail")
    assert "kvcompress run" in detail.locator("code").inner_text() and "method=alpha" in detail.inner_text()
    for link in detail.locator("a").all():
        target = Path(page.evaluate("a => decodeURIComponent(new URL(a.href).pathname)", link.element_handle()))
        assert target.is_file()
    page.get_by_role("button", name="Details of alpha").first.click()
    assert page.locator("tr.more").count() == 0


def test_samples_of_two_runs_stand_side_by_side_and_keys_walk_through_them(page, board):
    visit(page, board)
    page.get_by_role("button", name="Details of alpha").first.click()
    page.get_by_role("button", name="View samples").click()
    page.wait_for_selector("#sample h3")
    assert page.locator("#viewer-status").inner_text() == "8 of 8 samples"
    assert page.locator(".output h4").all_inner_texts() == ["alpha · 0.25", "full"]
    assert page.locator(".output pre").all_inner_texts() == ["answer 0", "an answer"]
    texts = page.locator("#sample pre.prompt").all_inner_texts()
    assert texts == ["start of s0 …", "… end of s0"] and "gold" in page.locator(".expected").inner_text()
    assert page.locator(".strip canvas").count() == 1 and page.locator(".strip .needle").count() == 1
    pixels = page.evaluate("""() => { const c = document.querySelector('.strip canvas');
        return [...c.getContext('2d').getImageData(0, 0, c.width, 1).data].filter((_, i) => i % 4 === 3); }""")
    assert pixels[0] == 255 and pixels[1] < 20 and 110 < pixels[2] < 145 and pixels[3] == 255
    page.keyboard.press("ArrowRight")
    assert (
        page.locator("#sample h3").inner_text() == "s1" and page.locator(".output pre").first.inner_text() == "answer 1"
    )
    page.select_option("#run-b", label="beta · 0.25")
    page.check("#differ")
    page.wait_for_function("document.querySelector('#viewer-status').textContent === '4 of 8 samples'")
    assert page.locator("#sample-list li").count() == 4
    page.keyboard.press("Escape")
    assert not page.locator("#viewer").is_visible()


def test_a_page_without_its_samples_says_so(browser, board, tmp_path):
    lonely = tmp_path / "lonely.html"
    lonely.write_bytes(board.read_bytes())
    tab = opened(browser)
    with tab as page:
        visit(page, lonely)
        page.get_by_role("button", name="Details of alpha").first.click()
        page.get_by_role("button", name="View samples").click()
        page.wait_for_function("document.querySelector('#viewer-status').textContent.includes('could not be loaded')")
        assert all("ERR_FILE_NOT_FOUND" in fault for fault in tab.faults)
        tab.faults.clear()


def test_figures_draw_the_numbers_of_the_records(page, board):
    visit(page, board)
    page.select_option("#f-protocol", "question seen")
    page.select_option("#f-task", "needle")
    lines = {series["name"]: series["data"] for series in option(page, "budget")["series"]}
    assert lines["beta"] == [[0.5, 1], [0.25, 0.5], [0.1, 0]] and lines["alpha"] == [[0.25, 0]]
    assert lines["others"] == [[0.3, 0.77]]
    points = {s["name"]: s["data"] for s in option(page, "pareto")["series"]}
    assert points["full"] == [[1, 1]] and points["front"] == [[0.1, 0], [0.25, 0.5], [0.5, 1]]
    page.select_option("#c-x-pareto", "read")
    points = {s["name"]: s["data"] for s in option(page, "pareto")["series"]}
    assert points["beta"][0] == pytest.approx([45 * MB / 2**20, 1]) and "others" not in points
    held = option(page, "held")["series"][1]
    assert held["data"][0] == pytest.approx([0, 10 * MB / 2**20]) and held["data"][-1] == pytest.approx(
        [4, 12 * MB / 2**20]
    )


def test_a_heat_map_has_runs_to_the_right_and_depth_downwards(page, board):
    visit(page, board)
    page.select_option("#f-protocol", "question seen")
    page.select_option("#f-task", "needle")
    drawn = option(page, "heat")
    assert drawn["x"]["data"] == ["full", "alpha · 0.25", "beta · 0.5", "beta · 0.25", "beta · 0.1"]
    assert drawn["y"]["data"][0] == "0%" and drawn["y"]["data"][-1] == "100%" and drawn["y"]["inverse"] is True
    cells = {(x, y): value for x, y, value in drawn["series"][0]["data"]}
    assert cells[3, 0] == 0 and cells[3, 1] == 1 and cells[0, 0] == 1 and cells[4, 7] == 0
    # the first depth is painted above the last
    tops = page.evaluate("""() => { const at = t => [...document.querySelectorAll('#card-heat svg text')]
        .find(n => n.textContent === t).getBoundingClientRect().top; return [at('0%'), at('100%')]; }""")
    assert tops[0] < tops[1]


def test_layers_run_to_the_right_and_heads_of_one_run_downwards(page, board):
    visit(page, board)
    page.select_option("#f-protocol", "question seen")
    page.select_option("#f-task", "needle")
    drawn = option(page, "layers")
    assert drawn["x"]["data"] == ["0", "1"] and drawn["y"]["data"] == ["alpha", "beta"]
    assert {(x, y): v for x, y, v in drawn["series"][0]["data"]} == {(0, 0): 2, (1, 0): 5, (0, 1): 3, (1, 1): 5}
    page.select_option("#c-layer-view", label="alpha · 0.25: layer × head")
    drawn = option(page, "layers")
    assert drawn["y"]["data"] == ["head 0", "head 1", "head 2"]
    assert {(x, y): v for x, y, v in drawn["series"][0]["data"]} == {
        (0, 0): 1, (0, 1): 2, (0, 2): 3, (1, 0): 4, (1, 1): 5, (1, 2): 6,
    }  # fmt: skip


def test_an_average_is_missing_where_a_data_set_is(page, board):
    visit(page, board)
    page.locator("#card-suite").scroll_into_view_if_needed()
    page.wait_for_selector("#card-suite tbody tr")
    lines = [line.split() for line in page.locator("#card-suite tbody tr").all_inner_texts()]
    assert lines == [["full", "1", "0.750", "1.000", "0.500"], ["beta", "0.5", "–", "0.250", "–"]]


def test_ranks_say_what_was_measured_and_what_joined(page, board):
    visit(page, board)
    page.select_option("#f-protocol", "question seen")
    page.select_option("#f-task", "needle")
    page.locator("#card-ranks").scroll_into_view_if_needed()
    page.select_option("#c-rank", "0.25")
    lines = [line.split() for line in page.locator("#card-ranks tbody tr").all_inner_texts()]
    assert lines == [["1", "1–2", "beta", "0.500", "measured"], ["2", "1–2", "alpha", "0.000", "measured"]]


def test_methods_are_drawn_in_colour_or_left_grey_as_chosen(page, board):
    visit(page, board)
    grey = page.evaluate("KV.colour('faint')")
    page.locator("#card-budget").scroll_into_view_if_needed()
    ink = """() => KV.plots.live.get(document.querySelector('#card-budget .plot')).getOption()
        .series.find(s => s.name === 'beta').lineStyle.color"""
    page.wait_for_selector("#card-budget svg")
    assert page.evaluate(ink) != grey
    page.get_by_label("beta", exact=True).uncheck()
    assert page.evaluate(ink) == grey


def test_the_theme_follows_the_system_until_it_is_chosen(browser, board):
    with opened(browser, color_scheme="dark") as page:
        visit(page, board)
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(ground)
        for name, same in (("light", False), ("dark", True)):
            page.locator("#theme").click()
            assert page.locator("#theme").get_attribute("aria-label") == f"Theme: {name}. Change it"
            assert (page.evaluate(ground) == dark) is same
        page.emulate_media(color_scheme="light")
        assert page.evaluate(ground) == dark
        page.locator("#theme").click()
        assert page.evaluate(ground) != dark


def test_a_phone_shows_every_row_without_scrolling_sideways(browser, board):
    with opened(browser, is_mobile=True, has_touch=True) as page:
        page.set_viewport_size({"width": 360, "height": 740})
        visit(page, board)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.get_by_role("button", name="Details of alpha").first.click()
        page.get_by_role("button", name="View samples").click()
        page.wait_for_selector("#sample h3")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.locator("#viewer-close").click()
        page.locator("#card-budget").scroll_into_view_if_needed()
        page.wait_for_selector("#card-budget svg")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_everything_can_be_reached_and_is_named_for_those_who_do_not_see_it(page, board):
    visit(page, board)
    nameless = page.evaluate("""() => [...document.querySelectorAll('button, select, input, [role=img], [role=region]')].filter(n =>
        n.offsetParent && !n.labels?.length && !n.textContent.trim() && !n.ariaLabel && !n.getAttribute('aria-labelledby'))
        .map(n => n.outerHTML)""")
    assert nameless == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the table"
    page.get_by_role("button", name="Score").focus()
    page.keyboard.press("Enter")
    assert page.locator("th[data-key=score]").get_attribute("aria-sort") == "descending"
    assert page.evaluate("document.activeElement.closest('th').dataset.key") == "score"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"


def test_text_of_others_is_never_run(browser, tmp_path):
    results = tmp_path / "results"
    run(results, "full", 1.0, [sample(EVIL, 1.0, EVIL)])
    rows = [sample(EVIL, 0.0, EVIL)]
    for key in ("prompt_first", "prompt_last"):
        rows[0]["meta"][key] = EVIL
    rows[0]["references"] = [[EVIL]]
    run(results, EVIL, 0.5, rows, variant=EVIL, error=EVIL, **{"parts.scorer": EVIL, "protocol.haystack": EVIL})
    run(results, EVIL, 0.25, rows, variant=EVIL, **{"parts.scorer": EVIL, "protocol.haystack": EVIL})
    written = write_page(gather([results]), tmp_path / "board.html", title=EVIL)
    with opened(browser) as page:
        visit(page, written.page)
        for line in page.locator("#body .open").all():
            line.click()
        page.get_by_role("button", name="View samples").last.click()
        page.wait_for_selector("#sample h3")
        assert (
            page.locator(".output pre").first.inner_text() == EVIL and page.locator("#sample h3").inner_text() == EVIL
        )
        page.keyboard.press("Escape")
        option(page, "budget")
        box = page.locator("#card-budget .plot").bounding_box()
        for x in range(0, int(box["width"]), 25):
            page.mouse.move(box["x"] + x, box["y"] + box["height"] / 2)
        assert page.evaluate("window.hit") is None and page.locator("img").count() == 0


def test_the_page_of_a_report_gives_commands_that_are_short(browser, tmp_path):
    run(tmp_path, "full", 1.0, [1.0])
    assert main([str(tmp_path), "--html", str(tmp_path / "board.html")]) == 0
    with opened(browser) as page:
        visit(page, tmp_path / "board.html")
        page.locator("#body .open").click()
        assert page.locator("code").inner_text() == (
            "kvcompress run model=tiny task=needle method=full budget=1.0 seed=0"
        )


@pytest.fixture(scope="module")
def crowd(tmp_path_factory) -> Path:
    """80 runs of 40 made-up methods beside the full cache, without times."""
    folder = tmp_path_factory.mktemp("crowd")
    untimed = {"time.ttft_s": None, "time.tpot_s": None, "memory.prefill_peak": None, "memory.decode_peak": None}
    run(folder / "r", "full", 1.0, [1.0] * 4, **untimed)
    for number in range(40):
        for budget in (0.5, 0.25):
            scores = [float(i < number % 4) for i in range(4)]
            run(folder / "r", f"made-up-{number:02}", budget, scores, **untimed)
    return write_page(gather([folder / "r"]), folder / "board.html", title="synthetic").page


def test_filters_and_order_stand_in_the_address_and_an_address_brings_them_back(page, board):
    visit(page, board)
    page.select_option("#f-method", "beta")
    page.fill("#search", "hidden")
    page.select_option("#f-sort", label="Score, highest first")
    rows, address = column(page, "score"), page.evaluate("location.href")
    assert rows == ["1.000", "0.500", "0.000"] and "method=beta" in address and "sort=-score" in address
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("html[data-ready]", state="attached")
    assert column(page, "score") == rows and page.locator("#f-method").input_value() == "beta"
    assert page.locator("th[data-key=score]").get_attribute("aria-sort") == "descending"
    page.get_by_role("link", name="Figures").click()
    assert page.evaluate("location.href") == address
    page.evaluate("location.hash = 'sort=ratio&method=nobody&budget=0.1'")
    page.wait_for_function("document.querySelector('#f-sort').value === 'ratio'")
    assert column(page, "budget") == ["0.1", "0.1"]
    page.locator("#clear").click()
    assert "=" not in page.evaluate("location.hash") and page.locator("[aria-sort]").count() == 0


def test_a_column_in_which_no_run_has_a_value_is_left_out(page, board, crowd):
    visit(page, board)
    assert page.locator("th[data-key=tpot]").inner_text().startswith("Per token ↓")
    visit(page, crowd)
    keys = [th.get_attribute("data-key") for th in page.locator("#head th").all()]
    assert keys == ["method", "budget", "score", "delta", "ratio", "read", "n"]


def test_a_method_has_one_look_in_all_figures_whatever_else_is_drawn(page, board):
    visit(page, board)
    page.select_option("#f-protocol", "question seen")
    page.select_option("#f-task", "needle")
    look = """() => [...document.querySelectorAll('.card .plot')].map(n => KV.plots.live.get(n)).filter(Boolean)
        .flatMap(c => c.getOption().series).filter(s => s.name === 'beta' && s.symbol.startsWith?.('path'))
        .map(s => [s.itemStyle.color, s.symbol].join())"""
    for card in ("budget", "pareto"):
        page.locator(f"#card-{card}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#card-{card} svg")
    first = page.evaluate(look)
    assert len(first) >= 2 and len(set(first)) == 1
    page.get_by_label("alpha", exact=True).uncheck()
    assert set(page.evaluate(look)) == set(first)


@pytest.mark.parametrize("width", [1400, 400])
def test_names_of_forty_methods_do_not_lie_over_each_other(browser, crowd, width):
    with opened(browser) as page:
        page.set_viewport_size({"width": width, "height": 900})
        visit(page, crowd)
        page.evaluate(
            "() => { let n; while ((n = document.querySelector('#methods input:not(:checked)'))) n.click(); }"
        )
        page.locator("#card-budget").scroll_into_view_if_needed()
        page.wait_for_selector("#card-budget svg")
        over = page.evaluate("""() => { const boxes = [...document.querySelectorAll('#card-budget .legend li')]
                .map(n => n.getBoundingClientRect());
            const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
            return [boxes.length, boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => meet(a, b))).length]; }""")
        assert over == [40, 0]
        assert page.evaluate("document.documentElement.scrollWidth") == width
