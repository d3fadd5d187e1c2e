"""The configuration: defaults, sources and their order, and what is said about mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.config import (
    Config,
    LearnerConfig,
    ObjectiveConfig,
    Section,
    close_names,
    difference,
    load_config,
    validated,
)
from halfbyte.errors import ConfigError, UserError


def toml(path: Path, text: str) -> Path:
    file = path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_are_the_recipe_that_learned() -> None:
    config = Config()
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (64, 8)
    assert config.rollout.temperature == 1.0
    assert (config.rollout.top_k, config.rollout.top_p, config.rollout.min_p) == (0, 1.0, 0.0)
    assert (config.learner.lr, config.learner.schedule, config.learner.warmup_steps) == (3e-4, "linear", 5)
    assert config.learner.betas[1] == 0.95
    assert config.learner.clip_norm == 1.0
    assert config.objective.advantage == "grpo"
    assert config.objective.skip_zero_advantage
    assert config.train.steps == 300
    assert config.env.name == "arithmetic:sort"
    assert config.precision == "w4a4kv4"
    assert config.learner.precision == "same"


def test_importing_the_configuration_does_not_import_torch() -> None:
    code = (
        "import sys, halfbyte.config\n"
        "halfbyte.config.load_config()\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_choices_are_those_of_the_objective() -> None:
    from halfbyte import objective

    fields = ObjectiveConfig.model_fields
    assert get_args(fields["advantage"].annotation) == get_args(objective.AdvantageMethod)
    assert get_args(fields["ratio"].annotation) == get_args(objective.RatioLevel)
    assert get_args(fields["proximal"].annotation) == get_args(objective.Proximal)
    assert get_args(fields["denominator"].annotation) == get_args(objective.DenominatorMethod)
    assert get_args(fields["kl_estimator"].annotation) == get_args(objective.KlEstimator)
    assert ObjectiveConfig().correction in objective.CORRECTIONS


def test_precedence_is_defaults_file_flags_sets(tmp_path: Path) -> None:
    file = toml(tmp_path, "[train]\nsteps = 10\nseed = 10\nthreads = 10\n")
    config = load_config(file, ["train.steps=30"], {"train.steps": 20, "train.seed": 20, "train.threads": None})
    assert (config.train.steps, config.train.seed, config.train.threads) == (30, 20, 10)
    assert config.train.keep_checkpoints == Config().train.keep_checkpoints


def test_the_last_set_wins() -> None:
    assert load_config(sets=["learner.lr=1", "learner.lr=2"]).learner.lr == 2.0


def test_a_file_sets_every_section(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        """
precision = { preset = "w4a4kv4", kv = "bf16", decode = { mlp = "bf16" } }
[model]
path = "models/mine"
[env]
name = "jsonl:data.jsonl"
options = { scoring = "numeric", eval_share = 0.2 }
reward = "mine:score"
[rollout]
stop = ["\\n", "END"]
[learner]
betas = [0.8, 0.9]
precision = "bf16"
[objective]
correction = "token_tis"
correction_options = { cap = 2.0 }
[eval]
every = 10
[train]
tracker = "trackio"
""",
    )
    config = load_config(file)
    assert config.precision == {"preset": "w4a4kv4", "kv": "bf16", "decode": {"mlp": "bf16"}}
    assert config.env.options == {"scoring": "numeric", "eval_share": 0.2}
    assert config.rollout.stop == ("\n", "END")
    assert config.learner.betas == (0.8, 0.9)
    assert config.objective.correction_options == {"cap": 2.0}
    assert (config.train.tracker, config.eval.every, config.model.path) == ("trackio", 10, "models/mine")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learner.lr=1e-5", 1e-5),
        ("learner.lr = 1e-5", 1e-5),
        ("learner.lr=.5", 0.5),
        ("learner.lr=1", 1.0),
        ("train.steps=1_000", 1000),
        ("train.steps=1e3", 1000),
        ("train.out=5", "5"),
        ("train.out=true", "true"),
        ("train.out=a=b", "a=b"),
        ('train.out="quoted"', "quoted"),
        ("train.out=none", "none"),
        ("train.out=C:\\runs", "C:\\runs"),
        ("train.tracker=none", None),
        ("train.tracker=wandb", "wandb"),
        ("train.threads=2", 2),
        ("train.threads=None", None),
        ("objective.dual_clip=none", None),
        ("objective.dual_clip=4", 4.0),
        ("learner.packing=false", False),
        ("learner.packing=False", False),
        ("learner.packing=0", False),
        ("learner.betas=[0.5, 0.6]", (0.5, 0.6)),
        ("learner.betas=0.5,0.6", (0.5, 0.6)),
        ("rollout.stop=END", ("END",)),
        ('rollout.stop=["a", "\\n"]', ("a", "\n")),
        ('rollout.stop="a", "b"', ("a", "b")),
        ("rollout.stop=[]", ()),
        ("precision=bf16", "bf16"),
        ('precision={preset="bf16"}', {"preset": "bf16"}),
        ("precision.kv=bf16", {"preset": "w4a4kv4", "kv": "bf16"}),
        ("precision.decode.mlp=bf16", {"preset": "w4a4kv4", "decode": {"mlp": "bf16"}}),
        ("env.options.max_digits=12", {"max_digits": 12}),
        ("env.options.scoring=numeric", {"scoring": "numeric"}),
        ("env.options.name=none", {"name": "none"}),
        ("env.options={a = [1, 2]}", {"a": [1, 2]}),
    ],
)
def test_set_reads_a_value_by_the_type_of_its_key(setting: str, value: object) -> None:
    config: Any = load_config(sets=[setting])
    for name in setting.partition("=")[0].strip().split("."):
        if isinstance(config, dict) or name == "kv" or name == "decode":
            break
        config = getattr(config, name)
        if name in ("precision", "options"):
            break
    assert config == value
    assert type(config) is type(value)


def test_sets_inside_a_table_of_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, 'precision = "bf16"\n[env.options]\na = 1\nb = 2\n')
    config = load_config(file, ["env.options.b=3", "precision.kv=fp4", "precision.decode.mlp=w4a4"])
    assert config.env.options == {"a": 1, "b": 3}
    assert config.precision == {"preset": "bf16", "kv": "fp4", "decode": {"mlp": "w4a4"}}


def test_loading_changes_no_default() -> None:
    before = Config().to_json()
    load_config(sets=["env.options.a=1", "precision.kv=bf16", "objective.correction_options.cap=1"])
    assert Config().to_json() == before


@settings(deadline=None)
@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_numbers_survive_the_command_line(lr: float) -> None:
    assert load_config(sets=[f"learner.lr={lr!r}"]).learner.lr == lr


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_paths_survive_the_command_line(path: str) -> None:
    bare = path.strip()
    quoted = len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\""
    if bare and not quoted and "#" not in bare:
        assert load_config(sets=[f"model.path={path}"]).model.path == bare


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("learner.lrr=1", ["learner.lrr: unknown key", "did you mean learner.lr"]),
        ("lr=1", ["lr: unknown key", "did you mean learner.lr"]),
        ("leaner.lr=1", ["leaner: unknown key", "did you mean learner"]),
        ("train.zzz=1", ["train.zzz: unknown key", "known in train: steps, seed"]),
        ("learner.lr=-1", ["learner.lr: ", "greater than or equal to 0", "got -1"]),
        ("learner.lr=nan", ["learner.lr: ", "finite"]),
        ("rollout.prompts_per_step=99999999999999999999", ["rollout.prompts_per_step: ", "1000000"]),
        ("eval.samples=1000001", ["eval.samples: ", "1000000"]),
        ("learner.lr=fast", ["learner.lr: ", "valid number", "got 'fast'"]),
        ("learner.lr.x=1", ["learner.lr is a value"]),
        ("learner=3", ["learner: "]),
        ("learner.schedule=step", ["'linear', 'constant' or 'cosine'"]),
        ("learner.betas=0.9", ["learner.betas: takes two numbers", "got [0.9]"]),
        ("learner.betas=[0.9, 0.9, 0.9]", ["learner.betas: ", "at most 2 items"]),
        ("learner.learning_rate=1", ["learner.learning_rate: unknown key (did you mean learner.lr"]),
        ("rollout.learning_rate=1", ["did you mean learner.lr"]),
        ("train.num_generations=4", ["rollout.samples_per_prompt"]),
        ("learner.betas=0.9,1", ["learner.betas", "less than 1"]),
        ("learner.precision.kv=bf16", ["learner.precision.preset"]),
        ("learner.minibatches=513", ["513", "512 samples"]),
        ("learner.clip_norm=0", ["learner.clip_norm", "greater than 0"]),
        ("rollout.temperature=0", ["rollout.temperature", "greater than or equal to 0.001"]),
        ("rollout.temperature=1e-4", ["rollout.temperature", "greater than or equal to 0.001"]),
        ("rollout.temperature=1e4", ["rollout.temperature", "less than or equal to 1000"]),
        ("rollout.top_k=2147483648", ["rollout.top_k", "less than 2147483648"]),
        (
            "eval.temperature=1e-4",
            ["eval.temperature", "less than or equal to 0,", "or input should be greater than or equal to 0.001"],
        ),
        ("eval.temperature=1e4", ["eval.temperature", "less than or equal to 1000"]),
        ("rollout.top_p=0", ["rollout.top_p"]),
        ("rollout.top_p=1.1", ["rollout.top_p"]),
        ("rollout.min_p=-0.1", ["rollout.min_p"]),
        ("rollout.page_size=17", ["rollout.page_size", "multiple of 16"]),
        ("rollout.page_size=0", ["rollout.page_size"]),
        ("rollout.samples_per_prompt=0", ["rollout.samples_per_prompt"]),
        ('rollout.stop=[""]', ["rollout.stop", "at least 1 character"]),
        ("objective.dual_clip=1", ["objective.dual_clip", "greater than 1"]),
        ("objective.eps_low=1.5", ["objective.eps_low"]),
        ("train.steps=0", ["train.steps"]),
        ("train.steps=1.5", ["train.steps", "integer"]),
        ("train.seed=-1", ["train.seed"]),
        ("train.seed=9223372036854775808", ["train.seed"]),
        ("train.tracker=mlflow", ["'trackio' or 'wandb'"]),
        ("eval.temperature=-1", ["eval.temperature"]),
    ],
)
def test_mistakes_name_the_key_and_the_setting(setting: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(sets=[setting])
    message = str(caught.value)
    for part in parts:
        assert part in message
    if "minibatches" not in setting:  # a rule over two keys belongs to neither
        assert f"--set {setting}" in message


@pytest.mark.parametrize("setting", ["learner.lr", "=1", ".lr=1", "learner.=1", "learner..lr=1", ""])
def test_settings_of_another_form(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(sets=[setting])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[learner]\nlrr = 1\n", ["learner.lrr: unknown key (did you mean learner.lr?)"]),
        ("[leaner]\nlr = 1\n", ["leaner: unknown key (did you mean learner?)"]),
        ("steps = 3\n", ["steps: unknown key (did you mean train.steps?)"]),
        ("[train]\nsteps = 3.0\nsead = 1\n", ["train.steps: ", "train.sead: unknown key (did you mean train.seed?)"]),
        ("[train]\nsteps = '3'\n", ["train.steps: ", "integer"]),
        ("[train]\nsteps = true\n", ["train.steps: ", "integer"]),
        ("[learner]\nlr = true\n", ["learner.lr: ", "number"]),
        ("[learner]\nlr = '1'\n", ["learner.lr: ", "number"]),
        ("[learner]\npacking = 1\n", ["learner.packing: ", "boolean"]),
        ("[learner]\nlr = inf\n", ["learner.lr: ", "finite"]),
        ("[learner]\nlr =\n", ["not TOML", "line 2"]),
        ("learner = 3\n", ["learner: "]),
        ("precision = 4\n", ["precision: "]),
        ("[env]\noptions = { day = 2020-01-01 }\n", ["no JSON form", "date"]),
        ("[learner]\nprecision = { preset = 'same' }\n", ["learner.precision.preset"]),
    ],
)
def test_mistakes_in_a_file_name_the_key_and_the_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    message = str(caught.value)
    assert str(file) in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (["rollout.in_flight=true"], "overlap = true"),
        (["rollout.overlap=true", "rollout.partial=true"], "in_flight = true"),
        (["rollout.staleness=-1"], "staleness"),
    ],
)
def test_ways_to_be_asynchronous_that_need_another_are_refused(sets: list[str], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        load_config(sets=sets)
    load_config(sets=["rollout.overlap=true", "rollout.in_flight=true", "rollout.partial=true", "rollout.staleness=3"])


def test_a_mistake_is_blamed_on_what_made_it(tmp_path: Path) -> None:
    file = toml(tmp_path, "[train]\nsteps = 3\nsead = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["learner.lr=-1"], {"train.steps": -2})
    assert str(caught.value).count("unknown key") == 1
    assert set(caught.value.where.split(", ")) == {"command-line flag", str(file), "--set learner.lr=-1"}


def test_settings_that_do_not_go_together_are_blamed_on_one_that_is_named() -> None:
    with pytest.raises(ConfigError, match="in_flight") as caught:
        load_config(sets=["rollout.in_flight=true", "rollout.staleness=1"])
    assert caught.value.where == "--set rollout.in_flight=true"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "folder"])
def test_files_that_cannot_be_read(tmp_path: Path, content: object) -> None:
    file = tmp_path / "run.toml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.mkdir()
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.where == str(file)


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load_config(file).train.steps == 3


def test_resolved_json_restores_the_configuration(tmp_path: Path) -> None:
    sets = [
        "learner.lr=1e-5",
        "precision.kv=bf16",
        "env.options.a=[1, 2.5, true]",
        "objective.dual_clip=none",
        "rollout.stop=X",
    ]
    config = load_config(sets=sets)
    data = json.loads(json.dumps(config.to_json(), allow_nan=False))
    assert Config.from_json(data) == config
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data))
    assert load_config(file) == config
    assert json.dumps(Config.from_json(data).to_json()) == json.dumps(config.to_json())
    assert data["rollout"]["stop"] == ["X"]


def test_a_resolved_file_with_a_stray_key_is_refused() -> None:
    data = Config().to_json()
    data["learner"]["momentum"] = 1
    with pytest.raises(ConfigError, match=r"learner\.momentum: unknown key"):
        Config.from_json(data, "runs/x/config.json")


def test_broken_json_says_so(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, match in (("{", "not JSON"), ("[]", "not a table")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=match):
            load_config(file)


def test_difference_lists_every_key_that_differs_and_no_other() -> None:
    a = load_config(sets=["env.options.x=1", "env.options.y=1"])
    b = load_config(sets=["learner.lr=1e-5", "env.options.x=2", "precision.kv=bf16", "train.tracker=wandb"])
    assert difference(a, a) == []
    assert difference(a, b) == [
        "env.options.x: 1 -> 2",
        "env.options.y: 1 -> (absent)",
        "learner.lr: 0.0003 -> 1e-05",
        'precision: "w4a4kv4" -> (absent)',
        'precision.kv: (absent) -> "bf16"',
        'precision.preset: (absent) -> "w4a4kv4"',
        'train.tracker: null -> "wandb"',
    ]
    assert difference(a.to_json(), json.loads(json.dumps(b.to_json()))) == difference(a, b)


def test_difference_sees_types() -> None:
    a, b = (load_config(sets=[f"env.options.x={x}"]) for x in ("1", "'1'"))
    assert difference(a, b) == ['env.options.x: 1 -> "1"']


def test_keys_of_an_older_run_are_reported() -> None:
    old = Config().to_json()
    del old["learner"]["packing"]
    assert difference(old, Config()) == ["learner.packing: (absent) -> true"]


def test_assignment_is_checked_too() -> None:
    learner = LearnerConfig()
    learner.schedule = "constant"
    with pytest.raises(ValueError, match="schedule"):
        learner.schedule = "stepwise"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="lrr"):
        LearnerConfig(lrr=1)  # type: ignore[call-arg]


class Small(Section):
    """Options of some module."""

    size: int = 1


def test_small_option_tables_get_the_same_messages() -> None:
    assert validated(Small, {"size": 2}, "here").size == 2
    with pytest.raises(UserError, match=r"sise: unknown key \(did you mean size\?\)") as caught:
        validated(Small, {"sise": 2}, "options of x")
    assert caught.value.where == "options of x"


def test_close_names() -> None:
    assert close_names("Learner", ["learner", "leaner", "rollout"])[0] == "learner"
    assert close_names("zzz", ["learner"]) == []
