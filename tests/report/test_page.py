"""The page of a sweep: what it holds without a browser. Numbers are those of the records, text of others stays text."""

from __future__ import annotations

import gzip
import hashlib
import html.parser
import json
import re

import pytest
from boards import MB, run, sample

from kvcompress.commands.report import main
from kvcompress.report import page, page_data, samples
from kvcompress.report.command import Commands
from kvcompress.report.page import asset, write_page
from kvcompress.report.pareto import draw_fronts, fronts
from kvcompress.report.run_index import gather

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> <!-- \u2028 & \ud800'


@pytest.fixture
def results(tmp_path):
    """Two settings, two methods; the first setting has two prompt lengths."""
    for pair, question in (("p", "seen"), ("q", "hidden")):
        grid = [
            sample(f"{length}-{depth}", float(length == 1000 and depth < 0.9), depth=depth, length=length)
            for length in (500, 1000)
            for depth in (0.1, 0.9)
        ]
        run(tmp_path, "full", 1.0, grid, pair=pair, **{"protocol.question": question})
        run(tmp_path, "good", 0.5, [1.0, 0.5, 0.25, 0.0], pair=pair, **{"protocol.question": question})
    return tmp_path


def built(results, **more):
    return page_data.build(gather([results]), [], results / "board.html", Commands(), **more)


def parts(path):
    """Data of a written page: the content of its JSON scripts by id."""
    found = {}

    class Reader(html.parser.HTMLParser):
        name = None

        def handle_starttag(self, tag, attributes):
            asked = dict(attributes)
            assert not any(key.startswith("on") for key in asked), "no markup carries code"
            if tag == "script":
                assert "src" not in asked
                self.name = asked.get("id")

        def handle_data(self, data):
            if self.name:
                found[self.name] = json.loads(data)
                self.name = None

    Reader().feed(path.read_text(encoding="utf-8"))
    return found


def test_rows_hold_the_numbers_of_their_records(results):
    data = built(results)
    good = next(row for row in data["rows"] if row["method"] == "good")
    expected = {"score": 0.4375, "budget": 0.5, "ratio": 0.5, "held": 50 * MB, "read": 45 * MB, "mem": 300 * MB}
    expected |= {
        "ttft": 1.25,
        "tpot": 0.025,
        "n": 4,
        "protocol": "question hidden",
        "share": True,
        "ok": True,
        "base": False,
    }
    assert {key: good[key] for key in expected} == expected
    # no sample of "good" is one of "full": nothing can be paired, and nothing is said
    assert good["delta"] is None and good["p"] is None


def test_rows_hold_scores_by_length_and_the_table_has_a_column_for_each(tmp_path):
    buckets = {"metrics.score_0-4k": 0.5, "metrics.score_4-8k": 0.25, "metrics.score_8k+": 0.125}
    run(tmp_path, "full", 1.0, [1.0, 0.0], **buckets)
    (row,) = built(tmp_path)["rows"]
    assert [row[key] for key in ("words4", "words8", "words9")] == [0.5, 0.25, 0.125]
    table = asset("table.js")
    assert all(
        f'["{key}", "{label}"]' in table for key, label in (("words4", "0–4k"), ("words8", "4–8k"), ("words9", "8k+"))
    )


def test_groups_are_settings_and_start_with_the_baseline(results):
    data = built(results)
    assert [(group["protocol"], group["task"]) for group in data["groups"]] == [
        ("question hidden", "needle"),
        ("question seen", "needle"),
    ]
    assert [(row["g"], row["method"], row["base"]) for row in data["rows"]] == [
        (0, "full", True),
        (0, "good", False),
        (1, "full", True),
        (1, "good", False),
    ]


def test_settings_that_differ_in_what_a_record_does_not_say_do_not_look_alike(tmp_path):
    for pair in ("1234567", "89abcde"):
        run(tmp_path, "good", 0.5, [1.0], pair=pair)
    run(tmp_path, "good", 0.5, [1.0], pair="own", **{"protocol.question": "hidden"})
    names = [row["protocol"] for row in built(tmp_path)["rows"]]
    assert names == ["question hidden", "question seen, setting 123456", "question seen, setting 89abcd"]


def test_heat_map_cells_are_length_depth_and_mean_score(results):
    data = built(results)
    at = next(str(i) for i, row in enumerate(data["rows"]) if row["method"] == "full" and row["g"] == 1)
    assert data["shapes"][1][at]["heat"] == [[500, 0.1, 0], [500, 0.9, 0], [1000, 0.1, 1], [1000, 0.9, 0]]


def test_depths_beyond_what_a_heat_map_can_show_are_rounded_to_tenths():
    rows = [sample(f"s{i}", float(i < 50), depth=i / 100) for i in range(100)]
    cells = {depth: score for _, depth, score in page_data.shape(rows, {})["heat"]}
    assert sorted(cells) == [i / 10 for i in range(11)]
    # about ten depths around each tenth; of those around 0.5 half were found
    assert cells[0.1] == 1 and cells[0.9] == 0 and cells[0.5] == 0.5


def test_lines_along_the_generation_are_means_over_samples(tmp_path):
    rows = [sample("a", 1.0), sample("b", 1.0, held=[20 * MB, 20 * MB, 20 * MB, 20 * MB, 22 * MB])]
    run(tmp_path, "good", 0.5, rows)
    data = built(tmp_path)
    assert data["shapes"][0]["0"]["held"] == [[0, 1, 2, 3, 4], [15 * MB, 15.25 * MB, 15.5 * MB, 15.75 * MB, 17 * MB]]
    assert data["shapes"][0]["0"]["layers"] == [3, 5]


def test_where_only_both_ends_were_recorded_a_line_joins_them(tmp_path):
    run(tmp_path, "good", 0.5, [sample("a", 1.0, held=None)])
    assert built(tmp_path)["shapes"][0]["0"]["held"] == [[0, 5], [10 * MB, 12 * MB]]


def test_thinned_lines_are_spread_over_the_tokens_there_are():
    out = {"held": [10.0, 20.0, 30.0], "tokens": [list(range(101))]}
    assert page_data.held_by(out) == ([0.0, 50.5, 101.0], [10.0, 20.0, 30.0])
    assert page_data.held_by({"held": [1.0], "tokens": [[1]]}) is None


def test_layers_and_heads_are_means_over_samples_of_one_form():
    made = [
        {"compressed": {"kept_per_layer": [1.0, 3.0], "kept_per_head": [[1, 3], [5, 7]]}},
        {"compressed": {"kept_per_layer": [3.0, 5.0], "kept_per_head": [[3, 5], [7, 9]]}},
    ]
    rows = [{"out": out, "score": 1.0} for out in made]
    assert page_data.shape(rows, {})["layers"] == [2, 4] and page_data.shape(rows, {})["heads"] == [[2, 4], [6, 8]]
    rows[0]["out"] = {"compressed": {"kept_per_layer": [1.0]}}
    assert "layers" not in page_data.shape(rows, {})


def test_links_lead_to_the_run_from_where_the_page_lies(results):
    target = results / "board & more" / "deep" / "page.html"
    write_page(gather([results]), target)
    for row in parts(target)["data"]["rows"]:
        assert "&" not in row["dir"] and (target.parent / row["dir"] / "record.json").is_file()


def test_the_page_names_no_address_and_runs_no_script_but_its_own(results):
    target = results / "board.html"
    write_page(gather([results]), target)
    text = target.read_text(encoding="utf-8")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "connect-src" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    for script in scripts:
        assert page.base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    own = text.replace(asset(page.CHARTS), "")  # which names its licence's address
    assert len(scripts) == len(page.SCRIPTS) and "http" not in re.sub(r"http://www\.w3\.org/\S+", "", own).replace(
        "http-equiv", ""
    )


def test_text_of_prompts_models_and_methods_stays_text(tmp_path):
    run(tmp_path, EVIL, 0.5, [sample(EVIL, 1.0, EVIL)], model=EVIL, task=EVIL, error=EVIL, variant=EVIL)
    target = tmp_path / "out" / "board.html"
    written = write_page(gather([tmp_path]), target, title=EVIL)
    text = target.read_text(encoding="utf-8")
    assert "<script>alert" not in text and "<img src=x" not in text and "&lt;img src=x" in text  # the title's
    row = parts(target)["data"]["rows"][0]
    assert row["method"].startswith("</script>") and row["variant"].startswith("</script>")
    for path in written.folder.glob("*.js"):
        content = path.read_text(encoding="utf-8")
        assert not set("<>&\u2028") & set(content) and re.fullmatch(
            r"KV\.(samples|prompts)\(.*\);\n", content, re.DOTALL
        )


def test_samples_lie_beside_the_page_and_prompts_are_stored_once(results):
    written = write_page(gather([results]), results / "board.html")
    assert written.samples == 16 and written.folder == results / "board_samples"
    data = parts(written.page)["data"]
    names = {row["file"] for row in data["rows"]} | {group["prompts"] for group in data["groups"]}
    assert {path.name for path in written.folder.iterdir()} == names and len(names) == 4 + 2
    row = next(r for r in data["rows"] if r["method"] == "full")
    call, _, rest = (written.folder / row["file"]).read_text().partition("(")
    name, answers = json.loads(f"[{rest.removesuffix(');' + chr(10))}]")
    assert call == "KV.samples" and name == row["file"]
    assert answers[0] == {"id": "500-0.1", "score": 0, "text": ["an answer"], "end": ["stop"]}


def test_a_prompt_that_differs_from_the_other_runs_is_stored_with_its_run(tmp_path):
    run(tmp_path, "a", 0.5, [sample("s", 1.0)])
    odd = sample("s", 1.0)
    odd["meta"]["prompt_hash"], odd["meta"]["prompt_last"] = "another", "another end"
    run(tmp_path, "b", 0.5, [odd])
    written = write_page(gather([tmp_path]), tmp_path / "board.html")
    texts = [path.read_text() for path in sorted(written.folder.glob("run-*.js"))]
    assert sum("another end" in text or "end of s" in text for text in texts) == 1


def test_samples_of_an_earlier_page_are_taken_away_and_nothing_else(results):
    target = results / "board.html"
    folder = write_page(gather([results]), target).folder
    (folder / "run-0000000000000000.js").write_text("old")
    (folder / "notes.js").write_text("mine")
    write_page(gather([results]), target)
    assert not (folder / "run-0000000000000000.js").exists() and (folder / "notes.js").exists()


def test_a_run_id_that_is_a_path_leads_nowhere():
    name = samples.Path(page_data.samples_file({"sweep": "../..", "run_id": "../../evil"}))
    assert name.parts == (name.name,) and re.fullmatch(r"run-[0-9a-f]{16}\.js", name.name)


def test_long_outputs_are_cut_and_say_so():
    found = samples.answer(sample("s", 1.0, "x" * (samples.LONGEST + 5)))
    assert len(found["text"][0]) == samples.LONGEST and found["cut"] == 5


def test_unfinished_and_failed_runs_are_on_the_page_but_not_on_the_board(tmp_path):
    run(tmp_path, "full", 1.0, [1.0])
    run(tmp_path, "big", 0.5, [], status="oom", score=None, n_samples=0, error="Traceback\nMemoryError: too big")
    (tmp_path / "board" / "cut").mkdir()
    (tmp_path / "board" / "cut" / "record.json").write_text("{")
    data = built(tmp_path)
    big = next(row for row in data["rows"] if row["method"] == "big")
    assert (
        not big["ok"]
        and big["error"] == "MemoryError: too big"
        and big["flags"] == ["oom"]
        and len(data["skipped"]) == 1
    )
    assert all(rank["rows"] == [] for rank in data["groups"][0]["ranks"])


def test_numbers_of_others_are_rows_without_a_group(tmp_path):
    run(tmp_path, "full", 1.0, [1.0])
    foreign = [
        {
            "origin": "published",
            "model": "L",
            "task": "needle",
            "method": "SnapKV",
            "budget": 0.5,
            "score": 0.5,
            "source": "a paper",
        }
    ]
    data = page_data.build(gather([tmp_path]), foreign, tmp_path / "b.html", Commands())
    row = data["rows"][-1]
    assert row["g"] is None and not row["ok"] and row["source"] == "a paper" and "dir" not in row
    assert sum(len(rank["rows"]) for group in data["groups"] for rank in group["ranks"]) == 0


def test_the_same_records_give_the_same_page(results):
    first = write_page(gather([results]), results / "a" / "board.html").page.read_bytes()
    assert write_page(gather([results]), results / "b" / "board.html").page.read_bytes() == first


def test_the_charts_library_is_the_release_that_its_name_says():
    """ECharts 6.1.0's dist/echarts.min.js as its publisher's package has it, with licence and notice beside it."""
    data = gzip.decompress(
        page.resources.files("kvcompress.report").joinpath("page", *page.CHARTS.split("/")).read_bytes()
    )
    assert hashlib.sha256(data).hexdigest() == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
    assert "Apache License" in asset("vendor/LICENSE-echarts") and "Apache Software Foundation" in asset(
        "vendor/NOTICE-echarts"
    )


def test_fronts_hold_the_records_values_in_the_units_of_their_axes(tmp_path):
    run(tmp_path, "full", 1.0, [1.0, 1.0])
    run(tmp_path, "good", 0.5, [1.0, 0.5])
    run(tmp_path, "worse", 0.6, [0.5, 0.5])
    run(tmp_path, "big", 0.5, [], status="oom", score=None, n_samples=0)
    held, read, time = fronts([entry.record for entry in gather([tmp_path]).entries])
    points = {record["method"]: (cost, score) for cost, score, record in held["points"]}
    assert points == {"full": (1.0, 1.0), "good": (0.5, 0.75), "worse": (0.6, 0.5)}
    assert {r["method"]: cost for cost, _, r in read["points"]} == pytest.approx(
        {"full": 90 * MB / 2**20, "good": 45 * MB / 2**20, "worse": 54 * MB / 2**20}
    )
    assert {r["method"]: cost for cost, _, r in time["points"]} == pytest.approx({"full": 30, "good": 25, "worse": 26})
    assert [held["points"][i][2]["method"] for i in held["front"]] == ["good", "full"]
    assert sorted(path.suffix for path in draw_fronts(gather([tmp_path]).entries, tmp_path / "png")) == [".png", ".svg"]


def test_report_writes_everything_into_one_folder(results, capsys):
    out = results / "out"
    assert main([str(results / "board"), "--all", str(out)]) == 0
    assert {"board.html", "board.md", "board.csv", "board_samples", "figures"} <= {path.name for path in out.iterdir()}
    kinds = {path.suffix for path in (out / "figures").iterdir()}
    assert kinds == {".png", ".svg"}
    assert str(out / "board.html") in capsys.readouterr().err.splitlines()[-1]
