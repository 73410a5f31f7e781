"""The benchmark task: the same items everywhere, the tail that it was chosen for, answers that its reward accepts."""

import statistics

import pytest
from bench.gpu.places import count_task
from hypothesis import given
from hypothesis import strategies as st

from tba.rewards import lookup

task = count_task()
NAMES = sorted(task.VARIANTS)


def test_an_item_is_what_it_was_when_results_were_first_recorded():
    item = task.make_item("count", "train", 0)
    assert item.question == (
        'How many times does the word "eagle" appear in this list? queen, coin, coin, eagle\n'
        'End with "Answer:" and the result.'
    )
    assert item.worked == "queen 0\ncoin 0\ncoin 0\neagle 1\nAnswer: 1"
    assert item.answer == "1"


@given(st.sampled_from(NAMES), st.sampled_from(["train", "test", "sft"]), st.integers(0, 10**6))
def test_an_item_depends_on_its_place_alone_and_counts_right(name, stream, index):
    item = task.make_item(name, stream, index)
    assert item == task.make_item(name, stream, index)
    words = item.question.split("list? ")[1].split("\n")[0].split(", ")
    wanted = item.question.split('"')[1]
    assert 4 <= len(words) <= task.VARIANTS[name].most
    assert len(set(words)) <= 3 and set(words) <= set(task.WORDS)
    assert item.answer == str(words.count(wanted))
    assert item.worked.count("\n") == len(words)


def test_streams_do_not_share_items():
    train, test = ({task.make_item("count", s, i).question for i in range(500)} for s in ("train", "test"))
    assert len(train & test) < 5  # four words of few different ones may come twice


@given(st.sampled_from(NAMES), st.integers(0, 10**4))
def test_the_reward_accepts_the_worked_answer_and_no_other_number(name, index):
    item, reward = task.make_item(name, "train", index), lookup("gsm8k")
    assert reward(item.question, item.worked, item.answer) == 1.0
    assert reward(item.question, f"{item.worked}{1 if item.answer != '1' else 2}", item.answer) == 0.0
    assert reward(item.question, "no idea", item.answer) == 0.0


@pytest.mark.parametrize(
    ("name", "median", "ninety", "most"), [("count", 8, 17, 30), ("count-long", 12, 31, 80), ("count-short", 4, 4, 4)]
)
def test_lists_are_mostly_short_and_sometimes_long(name, median, ninety, most):
    """About 4 tokens a line: answers of 37 tokens in the middle, 75 at the 90th percentile (bench.md §1)."""
    sizes = sorted(task.make_item(name, "train", i).worked.count("\n") for i in range(4000))
    assert abs(statistics.median(sizes) - median) <= 1
    assert abs(sizes[int(0.9 * len(sizes))] - ninety) <= 2
    assert sizes[0] == 4 and sizes[-1] == most


def test_forty_five_words_are_different():
    assert len(set(task.WORDS)) == len(task.WORDS) == 45


def test_prompts_are_written_as_the_job_reads_them(tmp_path):
    from pathlib import Path

    from tba.contracts.config import Prompts
    from tba.prompts import read_prompts

    items = [task.make_item("count", "train", i) for i in range(3)]
    task.write_prompts(tmp_path / "train.jsonl", items)
    found = read_prompts(Prompts(uri="file://train.jsonl"), base_dir=Path(tmp_path))
    assert [(p.text, p.answer) for p in found] == [(i.question, i.answer) for i in items]
