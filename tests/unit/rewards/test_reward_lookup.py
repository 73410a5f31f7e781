import subprocess
import sys
from pathlib import Path

import pytest

from tba import rewards
from tba.contracts.errors import UserError
from tba.rewards import RewardSource, load, lookup, names

WORKLOADS = Path(rewards.__file__).parents[2]


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_the_built_in_rewards_are_the_files_of_the_package():
    assert names() == ["arithmetic", "fake", "gsm8k", "math", "regex"]


@pytest.mark.parametrize("name", ["arithmetic", "fake", "gsm8k", "regex"])
def test_a_built_in_reward_is_found_by_name(name):
    assert lookup(name).__module__ == f"tba.rewards.{name}"


@pytest.mark.parametrize("name", ["gsm9k", "sandbox", "child", "", "os.path"])
def test_an_unknown_name_is_refused_with_what_exists(name):
    with pytest.raises(UserError, match="arithmetic, fake, gsm8k, math, regex"):
        lookup(name)


def test_an_entry_point_is_imported_from_the_search_path(user_code):
    (user_code / "my_tasks.py").write_text(
        "def score(prompt, response, answer, scale=1.0): return scale * len(response)"
    )
    source = RewardSource("entrypoint", "my_tasks:score", search_path=str(user_code), parameters={"scale": 2.0})
    assert load(source).function("q", "abc", None, scale=2.0) == 6.0


def test_a_file_is_run_from_its_text_even_if_it_has_changed_on_disk(user_code):
    source = RewardSource("file", str(user_code / "gone.py"), text="def reward(prompt, response, answer): return 3.0")
    assert load(source).function("q", "r", None) == 3.0
    assert source.label == "gone.py"


@pytest.mark.parametrize(
    ("code", "target", "message"),
    [
        ("", "absent_module_x:score", "there is no module 'absent_module_x'"),
        ("", "broken_a:score", "broken_a.py has no function 'score'. Define `def score"),
        ("def score(p, r, a): ...", "broken_e:scorex", "broken_e.py has no function 'scorex'. Did you mean 'score'?"),
        ("score = 3", "broken_b:score", "'score' of .*broken_b.py cannot be called: got int"),
        ("def score(prompt): ...", "broken_c:score", "too many positional"),
        ("def score(p, r, a, *, weight): ...", "broken_d:score", "'weight'"),
    ],
)
def test_an_entry_point_that_cannot_be_called_is_refused(user_code, code, target, message):
    (user_code / (target.split(":")[0] + ".py")).write_text(code) if code or "broken" in target else None
    with pytest.raises(UserError, match=message):
        load(RewardSource("entrypoint", target, search_path=str(user_code)))


def test_a_module_whose_own_import_fails_reports_that_import(user_code):
    (user_code / "needs_more.py").write_text("import absent_module_y")
    with pytest.raises(ModuleNotFoundError, match="absent_module_y"):
        load(RewardSource("entrypoint", "needs_more:score", search_path=str(user_code)))


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gsm8k", {"mod": "strict"}, r"unexpected keyword argument 'mod'.*takes \['mode'\]"),
        ("gsm8k", {"mode": "first"}, "mode must be one of"),
        ("arithmetic", {"digits": 2}, "takes no parameters"),
        ("regex", {}, "missing a required.*'pattern'"),
        ("regex", {"pattern": "["}, "no regular expression"),
        ("fake", {"mean": 2}, "between 0 and 1"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_at_load(name, parameters, message):
    with pytest.raises(UserError, match=message):
        load(RewardSource("name", name, parameters=parameters))


def test_the_hash_names_the_source_and_the_parameters(user_code):
    def hash_of(text, parameters):
        return load(RewardSource("file", "r.py", text=text, parameters=parameters)).source_hash

    code = "def reward(prompt, response, answer, **parameters): return 1.0"
    assert hash_of(code, {"a": 1, "b": 2}) == hash_of(code, {"b": 2, "a": 1})
    assert hash_of(code, {"a": 1}) != hash_of(code, {"a": 2})
    assert hash_of(code, {}) != hash_of(code + " ", {})


def test_the_child_program_imports_nothing_heavy():
    heavy = {"torch", "numpy", "pydantic", "sympy", "typing_extensions"}
    program = f"import sys, tba.rewards.child; print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(WORKLOADS)}, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"
