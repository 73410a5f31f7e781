import html.parser
import re

import pytest
from support.synthetic_run import (
    START,
    evaluation,
    event,
    latest,
    log_object,
    run_record,
    sample,
    searcher,
    step_row,
    whole_run,
)

from tba.contracts import keys
from tba.contracts.history import Progress, QuarantineRow
from tba.report.history import History, assemble
from tba.report.page import build_report, clean, flatten, number, render_live, render_report
from tba.store import open_store

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202eevil\x00\x1b[31m\ud800"


class Page(html.parser.HTMLParser):
    """Tags, attributes, and whether every tag is closed."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.ids, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [v for k, v in attrs if k == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [v for k, v in attrs if k == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def whole(rows=None, **changes):
    return assemble(rows or whole_run(60), run=run_record(**changes), latest=latest())


def report(history):
    return render_report(history, now=START + 200, uri="s3://bucket/run")


@pytest.fixture(scope="module")
def text():
    """The page of a whole run: its figures take seconds."""
    return report(whole())


def test_the_page_of_a_whole_run_has_every_figure_and_table(text):
    page = Page(text)
    assert page.open == []
    assert page.tags.count("svg") == 16
    for part in ("default/arithmetic", "searcher-0", "truncated", "Best", "Worst", "Random", "totalSteps reached",
                 "objective.beta", "± SE"):  # fmt: skip
        assert part in text


def test_the_page_stands_alone_and_runs_nothing(text):
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "image", "img", "form"} & set(page.tags)
    assert not [v for k, v in page.attributes if k in ("src", "href", "action") and not (v or "").startswith("#")]
    assert not [k for k, _ in page.attributes if k.startswith("on")]
    assert "http://" not in text
    assert "https://" not in text
    assert not re.search(r"@import|url\((?!#)", text)


def test_no_id_stands_twice_and_every_reference_finds_its_id(text):
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | {v[1:] for k, v in page.attributes if k == "href"}
    assert used <= set(page.ids)


def test_figures_follow_the_colour_scheme_of_the_page(text):
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "#000000" not in text
    assert "fill: #ffffff" not in text


@pytest.mark.parametrize("field", ["prompt", "response", "searcher"])
def test_hostile_text_of_a_sample_stays_text(field):
    text = report(whole([step_row(1), sample(1, 0.5).model_copy(update={field: HOSTILE})]))
    page = Page(text)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "&lt;script&gt;" in text
    text.encode()


def test_hostile_text_anywhere_else_stays_text_too():
    rows = [
        step_row(1),
        event(HOSTILE, detail=HOSTILE),
        searcher(HOSTILE, "1" * 32).model_copy(update={"stats": {HOSTILE: 1.0}, "incarnation": "<b>" * 4}),
        QuarantineRow(epoch=1, step=1, time=START, key=HOSTILE, reason=HOSTILE),
    ]
    run = run_record().model_copy(update={"owner": HOSTILE, "run_id": "<i>"})
    page = Page(render_report(assemble(rows, run=run, latest=latest()), now=START, uri=HOSTILE))
    assert not {"script", "img", "b", "i"} & set(page.tags)


def test_control_direction_and_surrogate_characters_are_made_visible():
    assert clean("a\x00b\u202ec\ud800d\ne\tf") == "a\ufffdb\ufffdc\ufffdd\ne\tf"


def test_a_very_long_response_is_cut_and_says_so():
    assert clean("x" * 10_000).endswith("(10000 characters)")
    assert len(clean("x" * 10_000)) < 4100


def test_an_empty_run_has_a_page_that_says_so():
    text = report(History())
    assert Page(text).open == []
    assert "no run here yet" in text
    assert text.count("no data yet") == 16


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_just_started_run_has_a_page(steps):
    rows = [event("started"), *(step_row(s) for s in range(1, steps + 1))]
    assert Page(report(whole(rows))).open == []


def test_a_run_with_an_evaluation_and_no_step_has_a_page():
    text = report(whole([event("started"), evaluation(0)]))
    assert Page(text).tags.count("svg") == 1


def test_best_samples_are_the_best_and_worst_the_worst():
    rows = [step_row(1), *(sample(i, i / 100, f"answer {i}") for i in range(1, 60))]
    text = report(whole(rows))
    best, worst = text[text.index("<h3>Best") :], text[text.index("<h3>Worst") :]
    assert best.index("answer 59") < best.index("answer 58") < best.index("<h3>Worst")
    assert worst.index("answer 1<") < worst.index("answer 2<") < worst.index("<h3>Random")


def test_the_page_is_the_same_each_time(text):
    assert report(whole()) == text


def test_a_long_run_stays_a_small_page():
    assert len(report(whole(whole_run(3000)))) < 1_500_000


def test_a_report_is_built_from_the_bucket_alone(tmp_path):
    store = open_store(f"file://{tmp_path}")
    store.put_once(keys.RUN, run_record().to_json())
    store.cas(keys.LATEST, latest().to_json(), None)
    store.put_once(*log_object(1, 0, whole_run(30)))
    assert "30 of 120" in build_report(store, now=START)
    store.close()


def test_discarded_futures_are_mentioned():
    rows = [event("started"), *(step_row(s) for s in range(1, 9)), event("resumed", epoch=2, step=5)]
    assert "3 rows of discarded futures" in report(whole(rows))


def test_the_live_page_shows_state_and_reloads():
    progress = Progress(
        run_id="r", state="WaitingForData", detail="<b>waits</b>", epoch=1, step=44, total_steps=120, percentage=36.0,
        policy_version=44, reward=0.5, eval_score=None, staleness_mean=1.0, trainer_idle_percent=3.0,
        trajectories=5000, replay_ratio=1.0, eta_seconds=None, searchers=2, last_updated_time=START,
    )  # fmt: skip
    text = render_live(whole(), progress, now=START)
    page = Page(text)
    assert page.open == []
    assert page.tags.count("svg") == 4
    assert "&lt;b&gt;waits" in text


def test_configuration_is_told_by_path():
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == [("a.b", "1"), ("a.c", "{}"), ("d", "null")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (12500, "12\u202f500"), (0.12345, "0.123"), (3.0, "3"), (12345.6, "12\u202f346")],
)
def test_numbers_are_read_by_people(value, text):
    assert number(value) == text


def test_a_wait_told_again_and_again_is_one_line_and_other_events_stay():
    waits = [event("waiting", time=START + 60 * i, detail=f"{i} of 500 rows") for i in range(300)]
    text = render_report(assemble([event("started", detail="from version 0"), *waits]), now=START)
    assert "from version 0" in text and "299 of 500 rows" in text and "298 of 500 rows" not in text
