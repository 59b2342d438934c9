"""A run file that is wrong is answered with what to change."""

import json
import math
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from learner.advantages.estimators import Grpo
from learner.losses.options import Gspo, Ppo
from learner.process.preflight import with_options
from pipeline.config import RunConfig
from pipeline.config.base import Section
from pipeline.config.explain import free_ports, is_free, resolve, show, split_address
from pipeline.config.load import USUAL_NAMES, dump, dump_yaml, load, model_at, parse_yaml
from pipeline.config.load import loads as loads_file
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import ConfigurationError


def loads(text, name="run file", overrides=(), environment=None):
    """A run file as ``load`` reads it; one that names no environment gets one."""
    if not any("environments" in part for part in (text, *overrides)):
        overrides = [*overrides, "environments.guess.name=number_guess"]
    return loads_file(text, name, overrides, environment)


def refusal(text="", overrides=(), environment=None):
    with pytest.raises(ConfigurationError) as caught:
        loads(text, "run.yaml", overrides, environment)
    return str(caught.value)


def test_what_a_file_leaves_out_has_its_default():
    assert loads("") == loads("engine:\nactor: {}\n")
    assert loads("").model_copy(update={"environments": RunConfig().environments}) == RunConfig()


def sections(kind=Section):
    yield kind
    for inner in kind.__subclasses__():
        yield from sections(inner)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_section_takes_a_number_without_end(value):
    keys = [(kind, key) for kind in sections() for key, f in kind.model_fields.items() if "float" in str(f.annotation)]
    assert len(keys) > 50
    for kind, key in keys:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({key: value})
        assert key in {error["loc"][0] for error in caught.value.errors() if error["loc"]}, (kind, key)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("", (), "run.yaml: expected a section environments with what is trained, for example environments: "),
        ("", (), "got an empty file; @tiny is a whole run file"),
        ("run: {seed: 1}", (), "got sections run"),
        ("environments: {}", (), "environments is empty: add at least one"),
        ("environments: {a: {}}", (), "run.yaml, line 1: environments.a needs the name of an environment"),
        ("environments:\n  a:\n", (), "run.yaml, line 2: environments.a needs the name"),
        (
            "environments: {guess: {name: number_guess}}",
            ("environments.gess.options.high=3",),
            "--set environments.gess.options.high=3: environments.gess needs the name of an environment, for example "
            "name: number_guess; did you mean environments.guess?",
        ),
    ],
)
def test_a_run_file_names_its_environments(text, overrides, words):
    with pytest.raises(ConfigurationError) as caught:
        loads_file(text, "run.yaml", overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("option", "right"),
    [
        ("run.seed = 1", "run.seed=1"),
        ("run.seed= 1", "run.seed=1"),
        ("run.seed =1", "run.seed=1"),
        ("run.seed=", "run.seed=VALUE"),
        ("run.seed", "run.seed=VALUE"),
        ("=1", "learner.learning_rate=1"),
    ],
)
def test_an_option_with_spaces_or_without_a_value_is_refused_with_the_right_form(option, right):
    words = f"--set {option}: expected section.key=value without spaces around =, as in --set {right}"
    assert refusal(overrides=[option]) == words


def test_later_sources_win_and_values_are_yaml():
    config = loads(
        "learner: {learning_rate: 1e-6, betas: [0.9, 0.95]}\nrun: {seed: 1}",
        overrides=["run.seed=3", "environments.guess.options.high=15", "environments.guess.name=number_guess"],
        environment={
            "AFTERPLAY__RUN__SEED": "2",
            "AFTERPLAY__LEARNER__GRAD_CLIP": "0.5",
            "AFTERPLAY_LOG_LEVEL": "debug",
        },
    )
    assert (config.run.seed, config.learner.grad_clip, config.learner.learning_rate) == (3, 0.5, 1e-6)
    assert config.environments["guess"].options == {"high": 15}


def test_a_list_element_can_be_set():
    config = loads("scorer: {functions: [{path: 'a:b'}]}", overrides=["scorer.functions.0.weight=2"])
    assert config.scorer.functions[0].weight == 2
    assert "from 0 to 0" in refusal("scorer: {functions: [{path: 'a:b'}]}", ["scorer.functions.7.weight=2"])


def test_an_override_changes_its_section_alone_and_not_what_shares_its_anchor():
    text = "environments:\n  a: &a {name: number_guess, options: {high: 9}}\n  b: *a\n  c: {<<: *a, weight: 2}\n"
    environment = {"AFTERPLAY__ENVIRONMENTS__A__WEIGHT": "0"}
    found = loads(text, overrides=["environments.c.options.high=5"], environment=environment).environments
    assert [section.weight for section in found.values()] == [0, 1, 2]
    assert [section.options["high"] for section in found.values()] == [9, 9, 5]


def test_merged_keys_are_those_that_a_section_does_not_have_itself():
    text = "a: {b: &b {<<: &c {x: 1, y: 1}, y: 2}}\nd: {<<: *b, x: 3}\ne: {<<: [*b, {z: 4}]}\n"
    merged = {"a": {"b": {"x": 1, "y": 2}}, "d": {"x": 3, "y": 2}, "e": {"x": 1, "y": 2, "z": 4}}
    assert parse_yaml(text, "text") == merged
    with pytest.raises(ConfigurationError, match="line 2: expected each key once, got 'x' on line 2"):
        parse_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}", "text")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run: {sed: 1}", "run.yaml, line 1: unknown key run.sed; did you mean run.seed?"),
        ("\nlearnr: {}", "run.yaml, line 2: unknown key learnr; did you mean learner?"),
        (
            "learner:\n  temperature: 1",
            "run.yaml, line 2: unknown key learner.temperature; there are sampling.temperature and "
            "evaluation.temperature, and learner has device",
        ),
        ("groups: {tasks: 1}", "unknown key groups.tasks; there is evaluation.tasks, and groups has n_rollout"),
        ("replay: {seed: 1}", "unknown key replay.seed; there is run.seed, and replay has enabled"),
        ("stage: {zzz: 1}", "stage has address"),
        ("environments: {a: {weigth: 1}}", "environments.a.weigth; did you mean environments.a.weight?"),
        ("groups:\n  n_rollout: 0", "line 2: groups.n_rollout: expected greater than or equal to 1, got 0"),
        ("engine: {kind: tpu}", "engine.kind: expected one of 'vllm', 'embedded' or 'external', got 'tpu'"),
        ("engine: {kind: external}", "give engine.urls"),
        ("engine: 3", "engine: expected a section (keys and values), got 3"),
        ("run: {name: 123}", 'run.name: expected text, got 123: write it in quotes, "123", and in a shell \'"123"\''),
        ("run: {name: true}", 'run.name: expected text, got True: write it in quotes, "true"'),
        ("run: {total_steps: many}", "run.total_steps: expected a valid integer"),
        ("sampling: {max_tokens: 4000}", "must be below model.max_length"),
        ("sampling: {temperature: 0.7}\nlearner: {reference: {url: http://a:1}}", "set sampling.temperature: 1, or"),
        ("run: {seed: 1}\nrun: {seed: 2}", "line 2: expected each key once, got 'run' on line 1 and again on line 2"),
        ("run: {seed: 1", "run.yaml, line 1"),
        (
            "run:\n  name: a\n seed: 1",
            "line 3: expected <block end>, but found '<block mapping start>': indent the keys",
        ),
        ("run:\n\tname: a", "line 2: found character '\\t' that cannot start any token: indent with spaces"),
        ("run:\n  name: a: b", "line 2: mapping values are not allowed here: write a text with ': ' in it in quotes"),
        ("run: {directory: 5}", "run.directory: expected a path, got 5"),
        ("run：\n  seed: 1", "line 2: mapping values are not allowed here; is '：' on line 1 meant as ':'?"),
        ("run: {seed: 1， name: a}", "line 1: expected ',' or '}', but got ':'; is '，' on line 1 meant as ','?"),
        ("run: {seed: 1｝\n", "; is '｝' on line 1 meant as '}'?"),
        ("run:\u00a01\nloss: {}", "; is '\\xa0' on line 1 meant as ' '?"),
        ("scorer: {functions: {path: exact}}", "scorer.functions: expected a list, got a section"),
        ("- 1", "expected sections like 'run:'"),
        ("1: 2", "expected a text as key, got 1"),
        *[
            (f"environments: {{{json.dumps(name)}: {{name: arithmetic}}}}", "expected names of at most 100 letters")
            for name in ("a/b", "", "'a'", 'a"b', "a b", "a\n", "ä", "x" * 101, "-a", ".", "..", "a\\b", "{a}", "a,b")
        ],
        ("loss: {policy: 3}", "line 1: loss.policy: expected the name of a function, or {name: NAME, OPTION: VALUE}"),
        ("loss: {policy: {name: 3}}", "loss.policy: expected the name of a function"),
        ("a: !!python/object:os.system {}", "run.yaml, line 1"),
    ],
)
def test_an_error_names_the_place_the_key_and_the_remedy(text, words):
    assert words in refusal(text)


@pytest.mark.parametrize(("wrong", "ours"), USUAL_NAMES.items())
def test_a_key_by_the_name_of_another_trainer_is_answered_with_ours(wrong, ours):
    *section, key = ours.split(".")
    assert key in model_at(RunConfig, tuple(section)).model_fields
    assert f"did you mean {ours}?" in refusal(f"learner: {{{wrong}: 1}}" if section else f"{wrong}: {{}}")


def test_one_text_is_a_list_of_it():
    config = loads("report_to: wandb\nsampling: {stop: END}\nenvironments: {a: {name: arithmetic}}")
    assert (config.report_to, config.sampling.stop) == (("wandb",), ("END",))


def test_all_errors_are_told_at_once():
    assert refusal("run: {sed: 1, seed: -1}\ngroups: {n_rollout: 0}").count("\n") == 2


def test_errors_of_options_name_the_option():
    assert refusal(overrides=["run.sed=1"]).startswith("--set run.sed=1: unknown key run.sed")
    assert "expected section.key=value" in refusal(overrides=["run.seed"])
    assert "expected names between" in refusal(overrides=["run..seed=1"])


@pytest.mark.parametrize("position", ["²", "-1", "one", "2"])
def test_a_position_of_a_list_is_a_number_that_is_there(position):
    assert f"expected a position from 0 to 1 in report_to, got {position!r}" in refusal(
        "report_to: [jsonl, console]\n", overrides=[f"report_to.{position}=x"]
    )
    assert "expected run.seed to be a section" in refusal("run: {seed: 1}", ["run.seed.deep=1"])
    assert refusal(environment={"AFTERPLAY__RUN__SEED": "x"}).startswith("environment variable AFTERPLAY__RUN__SEED")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml, got: No such file"):
        load(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        load(tmp_path)


scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=12)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3), max_leaves=8
)


@given(values)
def test_yaml_reads_what_it_wrote(value):
    assert parse_yaml(dump_yaml(value), "text") == value


@settings(max_examples=24)
@given(
    options=st.dictionaries(st.text(min_size=1, max_size=8), values, max_size=3),
    name=st.text(max_size=20),
    rate=st.floats(1e-9, 1.0),
    seed=st.integers(0, 2**40),
    directory=st.sampled_from(["runs", "/tmp/x y", "a: b", "1e-6", "no"]),
    stop=st.lists(st.text(max_size=5), max_size=3),
)
def test_a_dumped_configuration_loads_as_an_equal_one(options, name, rate, seed, directory, stop):
    base = RunConfig.model_validate(
        {
            "environments": {"e": {"name": name, "options": options}, "no": {}},
            "learner": {"learning_rate": rate},
            "run": {"seed": seed, "directory": directory},
            "sampling": {"stop": stop},
            "scorer": {"functions": [{"path": "a:b", "weight": rate}]},
        }
    )
    assert loads(dump(base)) == base
    assert loads(show(base)) == base
    assert loads(show(base, plain=True)) == base


def test_show_documents_every_key_that_has_documentation():
    text = show(RunConfig())
    assert "# Length of the run, in updates of the learner." in text
    assert "# Environments by name. The name is Task.environment and the env label of metrics." in text


def test_resolving_fixes_what_several_processes_must_know(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(loads("engine: {port: 0, replicas: 2}\nstage: {address: 'tcp://127.0.0.1:0'}"))
    assert config.engine.port > 0
    assert split_address(config.stage.address)[1] > 0
    assert config.run.path == tmp_path / "runs" / "run"
    assert config.metrics.port == 0
    assert resolve(config) == config
    config = resolve(loads("learner: {reference: {folder: teacher}}\nstage: {store: s/rollouts.sqlite}"))
    assert config.stage.store == tmp_path / "s" / "rollouts.sqlite"
    assert config.learner.reference.folder == tmp_path / "teacher"


def test_a_path_may_begin_at_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = loads(
        "environments: {q: {name: question, tasks_from: {kind: huggingface, path: ~/data}}}\n"
        "scorer: {functions: [{path: exact}]}\n"
        "loss: {supervised: {weight: 1, demonstrations: ~/shown.jsonl}}\n"
        "learner: {reference: {folder: ~/model}}\n"
        "stage: {curve: ~/keys, store: ~/s.sqlite}\nrun: {directory: ~/runs}"
    )
    paths = (config.environments["q"].tasks_from.path, config.loss.supervised.demonstrations, config.stage.curve)
    assert [str(path) for path in paths] == ["/home/me/data", "/home/me/shown.jsonl", "/home/me/keys"]
    assert (str(config.learner.reference.folder), str(config.run.directory)) == ("/home/me/model", "/home/me/runs")
    assert str(config.stage.store) == "/home/me/s.sqlite"
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "text",
    [
        "engine: {{port: {0}}}",
        "stage: {{address: 'tcp://127.0.0.1:{0}'}}\nengine: {{port: 0}}",
        "metrics: {{port: {0}}}\nengine: {{port: 0}}",
    ],
)
def test_a_port_in_use_is_named(text):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"{port} to be free, but it is in use"):
            resolve(loads(text.format(port)))


def test_external_engines_are_left_alone():
    text = "engine: {kind: external, urls: ['http://10.0.0.1:8000/']}"
    assert resolve(loads(text)).engine.addresses() == ("http://10.0.0.1:8000",)


def test_processes_of_one_machine_meet_at_a_socket_and_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(loads("engine: {port: 0}")).stage.address == "ipc://"
    given = "engine: {port: 0}\nstage: {address: 'ipc://s/hub', curve: keys}\nmodel: {chat_template: chat.jinja}"
    config = resolve(loads(given))
    assert config.stage.address == f"ipc://{tmp_path}/s/hub" and config.stage.curve == tmp_path / "keys"
    assert config.model.chat_template == str(tmp_path / "chat.jinja")
    assert resolve(config) == config


@pytest.mark.parametrize("address", ["127.0.0.1:1", "tcp://:1", "tcp://a:b", "tcp://a:99999", "ipc://x:1", ""])
def test_a_wrong_address_is_refused(address):
    with pytest.raises(ConfigurationError, match="or tcp://host:port"):
        split_address(address)


def test_ports_in_a_row_are_free():
    port = free_ports("127.0.0.1", 3)
    if sys.platform == "linux":
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        assert first < 30_000 or not first <= port + 2 <= last, "none that an outgoing connection is given meanwhile"
    assert all(is_free("127.0.0.1", port + i) for i in range(3))


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("urls: ['http://127.0.0.1:28100', 'http://127.0.0.1:28101']", "one for each engine"),
        ("replicas: 2, urls: ['http://127.0.0.1:28100']", r"replicas: 2\), got 1"),
        ("port: 28100, urls: ['http://127.0.0.1:28101']", "expected the port 28100"),
        ("port: 0, urls: ['http://127.0.0.1:28101']", ""),
        ("port: 28100, urls: ['http://127.0.0.1:28100']", ""),
        ("kind: external, urls: ['http://127.0.0.1:28100', 'http://127.0.0.1:28101']", ""),
    ],
)
def test_urls_of_engines_that_the_run_starts_are_where_they_listen(engine, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = loads(f"engine: {{{engine}}}")
    if says:
        with pytest.raises(ConfigurationError, match=says):
            resolve(config)
    else:
        assert resolve(config).engine.addresses() == config.engine.urls


CHOICES = """
loss: {policy: {name: sapo, negative: 1.5}, off_policy: {name: shaped, beta: 0.2}}
advantage: {estimator: {name: "mine.py:estimate", k: 3}}
"""


def test_options_of_a_function_are_kept_and_all_of_them_are_shown():
    config = with_options(loads(CHOICES))
    assert with_options(loads(dump(config))) == with_options(loads(show(config))) == config
    text = show(config)
    assert "negative: 1.5" in text and "positive: 1.0" in text and "k: 3" in text
    assert "clip_low: 0" not in text and "dual_clip" not in text and "gae_lambda" not in text


def test_a_name_alone_is_a_choice_whose_options_can_be_set():
    config = loads(
        "loss: {policy: gspo}", overrides=["loss.policy.clip_low=0.1", "advantage.estimator.normalize_std=false"]
    )
    assert with_options(config).loss.policy == Gspo(clip_low=0.1)
    assert with_options(config).advantage.estimator == Grpo(normalize_std=False)
    assert with_options(loads("loss: {policy: gspo}")).loss.policy == Gspo()
    other = loads("loss: {policy: {name: sapo, positive: 2}}", overrides=["loss.policy=ppo"])
    assert with_options(other).loss.policy == Ppo()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss: {policy: pppo}", "loss.policy: expected one of ppo, gspo, gspo_token, gmpo, cispo, sapo, dppo_tv,"),
        ("loss: {policy: pppo}", "or your own as module:function or file.py:function, got 'pppo'"),
        ("loss: {off_policy: 'a:b'}", "loss.off_policy: expected one of clip, shaped, second_moment, got 'a:b'"),
        ("replay: {correction: tokens}", "expected one of token, sequence, geometric, soft, got 'tokens'"),
        (
            "loss: {policy: {name: sapo, positiv: 2}}",
            "unknown key loss.policy.positiv; did you mean loss.policy.positive?",
        ),
        (
            "loss: {policy: {name: sapo, clip_low: 0.1}}",
            "unknown key loss.policy.clip_low; loss.policy has name, positive, negative",
        ),
        ("loss: {policy: {clip_low: 3}}", "loss.policy.clip_low: expected less than or equal to 1, got 3"),
        ("loss: {policy: {clip_low: true}}", "loss.policy.clip_low: expected a valid number"),
        ("replay: {correction: {name: soft, max: 2}}", "unknown key replay.correction.max"),
        ("advantage: {estimator: {greedy_rollouts: true}}", "unknown key advantage.estimator.greedy_rollouts"),
        ("advantage: {estimator: {name: cpo, failed_mean: 2}}", "failed_mean (2.0) must be below solved_mean (1.0)"),
        (
            "groups: {n_rollout: 4}\nadvantage: {estimator: {name: pass_at_k, k: 8}}",
            "advantage.estimator.k (8) is more than groups.n_rollout (4)",
        ),
        ("groups: {n_rollout: 1}", "advantage.estimator grpo compares the rollouts of a group"),
        ("groups: {zero_variance: drop}\nadvantage: {estimator: gae}", "also learns from groups with equal rewards"),
        ("groups: {zero_variance: drop}\nadvantage: {rewards: turns}", "the replay stage compares only outcomes"),
        (
            "groups: {zero_variance: drop, n_rollout: 1}\nadvantage: {estimator: 'a:b'}",
            "so the rewards of every group are equal",
        ),
    ],
)
def test_names_and_options_of_functions_are_refused_with_the_known_ones(text, words):
    with pytest.raises(ConfigurationError) as refused:
        with_options(loads(text))
    assert words in str(refused.value)


def test_all_wrong_options_are_named_at_once():
    with pytest.raises(ConfigurationError) as refused:
        with_options(loads("loss: {policy: {name: gspo, clip_lo: 1, clip_high: x}}\nreplay: {correction: none}"))
    assert len(str(refused.value).splitlines()) == 3


def test_sections_are_found_through_mappings_and_lists():
    assert model_at(RunConfig, ("environments", "x")) is EnvironmentConfig
    assert model_at(RunConfig, ("scorer", "functions", 0)).__name__ == "ScoreFunction"
    assert model_at(RunConfig, ("run", "seed")) is None


def test_every_shipped_run_file_loads():
    root = Path(__file__).resolve().parents[3] / "configs"
    for file in root.glob("*.yaml"):
        load(file, environment={})


@pytest.mark.parametrize(("key", "only", "value"), [("top_p", 1, 0.9), ("top_k", -1, 20)])
def test_rollouts_are_sampled_from_all_tokens(key: str, only: int, value: float) -> None:
    assert loads(f"sampling: {{{key}: {only}}}").sampling == loads("").sampling
    with pytest.raises(ConfigurationError, match=rf"sampling.{key}: expected {only}, got {value}: .*truncated"):
        loads(f"sampling: {{{key}: {value}}}")
