from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import tomli_w
from helpers.experiments import tiny
from helpers.paths import ROOT

from fedaux.config import ConfigError, Experiment, inspect, known_keys
from fedaux.recipes import find_recipe, load_experiment, read_recipe
from fedaux.running.preflight import problems_of
from fedaux.sweep import cells_of


def problems(**values: object) -> list[str]:
    return inspect(values)[1]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"split": {"alpha": 0}}, "split.alpha = 0: should be greater than 0"),
        ({"split": {"alpha": float("nan")}}, "split.alpha = NaN: should be a finite number"),
        (
            {"split": {"num_clients": 0}},
            "split.num_clients = 0: should be greater than or equal to 1",
        ),
        ({"participation_rate": 0}, "participation_rate = 0: should be greater than 0"),
        (
            {"participation_rate": 1.5},
            "participation_rate = 1.5: should be less than or equal to 1",
        ),
        (
            {"auxiliary": {"negatives_fraction": 1.0}},
            "auxiliary.negatives_fraction = 1.0: should be less than 1",
        ),
        (
            {"auxiliary": {"negatives_fraction": 0}},
            "auxiliary.negatives_fraction = 0: should be greater than 0",
        ),
        ({"local": {"epochs": "5"}}, 'local.epochs = "5": should be a valid integer'),
        ({"local": {"epochs": 2.5}}, "local.epochs = 2.5: should be a valid integer"),
        ({"local": {"epochs": True}}, "local.epochs = true: should be a valid integer"),
        (
            {"local": {"optimizer": "adamw"}},
            "local.optimizer = \"adamw\": should be 'adam' or 'sgd'",
        ),
        ({"local": 3}, "local = 3: should be a table, [local]"),
        (
            {"engine": {"device": "gpu"}},
            'engine.device = "gpu": should be auto, cpu, cuda or cuda:N',
        ),
        ({"local": {"epoch": 5}}, "local.epoch: unknown key; did you mean local.epochs?"),
        ({"alpha": 1.0}, "alpha: unknown key; did you mean split.alpha?"),
        ({"rouns": 3}, "rouns: unknown key; did you mean rounds?"),
        ({"seeds": "a"}, 'seeds = "a": should be a valid integer'),
        (
            {"distillation": {"negligible_weight": 0.1}},
            "distillation.negligible_weight: removed in fedaux 0.2.0; leave it out",
        ),
        (
            {"distillation": {"sharpening": 0.5}},
            "distillation.sharpening: removed in fedaux 0.3.0; leave it out",
        ),
        (
            {"batch_normalisation": {"server": "batch"}},
            "batch_normalisation: removed in fedaux 0.3.0; leave it out",
        ),
        (
            {"pretraining": {"redundancy": 0.1}},
            "pretraining.redundancy: removed in fedaux 0.3.0; leave it out",
        ),
        (
            {"pretraining": {"kind": "barlow"}},
            'pretraining.kind = "barlow": removed in fedaux 0.3.0; '
            "should be 'auto', 'contrastive', 'masked' or 'none'",
        ),
        ({"zzz": 3}, "zzz: unknown key"),
        ({"seeds": [1, 1]}, "seeds = [1, 1]: 1 appears more than once"),
        ({"seeds": []}, "seeds = []: should have at least 1 item"),
        ({"prototypes": [{"name": "a"}]}, "prototypes.0.model: missing"),
        ({"seeds": 3}, "seeds = 3: should be a list"),
        (
            {
                "split": {"num_clients": 3},
                "prototypes": [{"name": "a", "model": "cnn", "clients": [0, 3]}],
            },
            "prototypes.clients = 3: there are 3 clients, numbered 0 to 2",
        ),
        (
            {"pretraining": {"augmentation": {"crop_scale": [0.9, 0.2]}}},
            "pretraining.augmentation.crop_scale = [0.9, 0.2]: should be two rising numbers above "
            "0, at most 1",
        ),
    ],
)
def test_each_problem_gets_one_line_that_names_key_and_value(
    values: dict[str, object], line: str
) -> None:
    assert line in problems(**values)


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        split={"alpha": -1, "num_client": 3},
        local={"epochs": "x"},
        seeds=[0, 0],
        participation_rate=0,
        rouns=1,
    )
    assert len(found) == 6
    with pytest.raises(ConfigError, match="6 problems") as error:
        Experiment(
            split={"alpha": -1, "num_client": 3},
            local={"epochs": "x"},
            seeds=[0, 0],
            participation_rate=0,
            rouns=1,
        )
    assert error.value.problems == found


def test_a_wrong_item_is_told_once() -> None:
    assert problems(seeds=[-1]) == ["seeds.0 = -1: should be greater than or equal to 0"]


def test_a_joint_problem_is_not_told_about_a_key_that_is_wrong_itself() -> None:
    found = problems(
        split={"num_clients": -1}, prototypes=[{"name": "a", "model": "cnn", "clients": [50]}]
    )
    assert found == ["split.num_clients = -1: should be greater than or equal to 1"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"method": "fedauxx"}, "method = 'fedauxx': not known; did you mean fedaux or fedaux2?"),
        (
            {"method": "fedaux,fedavg"},
            "method = 'fedaux,fedavg': not known; several are a list, [fedaux,fedavg]",
        ),
        (
            {"method": "privatehead"},
            "method = 'privatehead': not known; did you mean private-head?",
        ),
        ({"data": {"source": "digit"}}, "data.source = 'digit': not known; did you mean digits?"),
        (
            {"data": {"source": "letters"}},
            "data.source = 'letters': has no labels, so it can only be auxiliary.source; should "
            "be digits, tensors, features, folder, parquet, csv, jsonl, huggingface, "
            "cifar10-binary, cifar100-binary, stl10-binary, idx, svhn",
        ),
        (
            {"auxiliary": {"source": "lines", "path": "."}},
            "auxiliary.source = 'lines': has texts; add the table [text]",
        ),
        (
            {"auxiliary": {"source": "letter"}},
            "auxiliary.source = 'letter': not known; did you mean letters?",
        ),
        (
            {"certainty": {"mechanism": "release"}},
            "certainty.mechanism = 'release': not known; did you mean released-code?",
        ),
        (
            {"certainty": {"mechanism": "maen"}},
            "certainty.mechanism = 'maen': not known; did you mean mean?",
        ),
        (
            {
                "method": ["fedavg", "feddf"],
                "prototypes": [
                    {"name": "own", "model": "cnn"},
                    {"name": "other", "model": "cnn", "clients": []},
                ],
            },
            "prototypes.clients = []: nobody trains 'other', because fedavg has no teacher; should "
            "list clients or be left out",
        ),
        (
            {"method": "private-head", "certainty": {"mechanism": "none"}},
            "certainty.mechanism = 'none': has no effect, because the methods of this run always "
            "use classes; should be left out. For hardly any noise set certainty.epsilon = 1000",
        ),
        (
            {"split": {"num_clients": 481}},
            "split.num_clients = 481: more clients than the 480 training examples",
        ),
        ({"data": {"source": "tensors"}}, "data.path: missing; the source tensors needs one"),
        (
            {"pretraining": {"checkpoint": "no.safetensors"}},
            "pretraining.checkpoint = 'no.safetensors': there is no such file",
        ),
        (
            {"prototypes": [{"name": "a", "model": "cnn", "options": {"widht": 3}}]},
            "prototypes.options.widht: cnn has no such option; did you mean width?",
        ),
    ],
)
def test_names_and_sizes_are_checked_before_work_starts(
    changes: dict[str, object], line: str
) -> None:
    assert problems_of(tiny(**changes)) == [line]


def test_overrides_change_nested_keys_and_are_parsed_as_toml_or_words(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("rounds = 3\n[local]\nepochs = 1\n")
    overrides = [
        "local.epochs=5",
        "method=[fedaux,feddf+p]",
        "split.alpha=0.5",
        'name="a"',
        "data.source=digits",
    ]
    experiment = load_experiment(path, overrides=overrides)
    assert experiment.local.epochs == 5
    assert experiment.method == ("fedaux", "feddf+p")
    assert (experiment.split.alpha, experiment.name, experiment.rounds) == (0.5, "a", 3)


def test_bad_overrides_and_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("rounds = 3\n")
    assert "should be key=value" in read_recipe(path, overrides=["rounds"])[1][0]
    assert read_recipe(path, overrides=["rounds.x=1"])[1] == ["rounds.x: rounds is not a table"]
    with pytest.raises(ConfigError, match="cannot be read"):
        load_experiment(tmp_path / "absent.toml")
    for text, words in (
        ("rounds = = 3", "not valid TOML"),
        ("rounds = " + "[" * 3000 + "]" * 3000, "not valid TOML"),
        ("rounds." + "a." * 900 + "b = 1", "should be at most 16 deep"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_experiment(path)


def test_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    experiment = tiny(method=["fedaux", "fedavg"], pretraining={"checkpoint": "x.safetensors"})
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(experiment.to_dict()))
    again = load_experiment(path)
    assert again == experiment
    assert again.sha256() == experiment.sha256()


def test_digest_depends_on_results_only() -> None:
    assert tiny().sha256() != tiny(rounds=4).sha256()
    assert (
        tiny().sha256() == tiny(output={"directory": "elsewhere"}, engine={"threads": 2}).sha256()
    )


def test_every_key_can_be_found() -> None:
    keys = known_keys()
    assert {"split.alpha", "pretraining.augmentation.flip", "prototypes.share", "method"} <= set(
        keys
    )


def test_the_documented_configuration_is_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = ROOT / "docs"
    monkeypatch.syspath_prepend(str(docs))
    page = importlib.import_module("make_configuration").page()
    assert page == (docs / "configuration.md").read_text(encoding="utf-8"), (
        "run python docs/make_configuration.py"
    )
    assert "None |" not in page  # every key has a meaning
    assert all(f"`{key.rpartition('.')[2]}`" in page or "[" + key in page for key in known_keys())


def test_a_recipe_states_what_differs_from_another(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        "rounds = 7\n[split]\nalpha = 0.5\nnum_clients = 3\n[local]\nepochs = 2\n"
    )
    (tmp_path / "own.toml").write_text(
        'extends = "base.toml"\nname = "own"\n[split]\nalpha = 2.0\n'
    )
    experiment = load_experiment(tmp_path / "own.toml", overrides=["local.epochs=4"])
    assert (experiment.name, experiment.rounds, experiment.local.epochs) == ("own", 7, 4)
    assert (experiment.split.alpha, experiment.split.num_clients) == (2.0, 3)
    (tmp_path / "shipped.toml").write_text('extends = "demo"\nrounds = 1\n')
    assert load_experiment(tmp_path / "shipped.toml").pretraining.epochs == 10


def test_a_key_can_be_unset() -> None:
    path = find_recipe("demo")
    plain = load_experiment(path, overrides=["certainty.epsilon=", "pretraining.augmentation="])
    assert plain.certainty.epsilon == Experiment().certainty.epsilon
    assert plain.pretraining.augmentation == Experiment().pretraining.augmentation
    assert plain.certainty.components == 12
    untouched = load_experiment(path, overrides=["local.privacy.noise_multiplier=", "rounds = "])
    assert untouched.local.privacy is None  # no empty table, which would turn on DP-SGD
    with pytest.raises(ConfigError, match=r"certainty\.epsilonn: unknown key; did you mean certai"):
        load_experiment(path, overrides=["certainty.epsilonn="])
    with pytest.raises(ConfigError, match=r"--set method=\[fedaux,: a list should end with \]"):
        load_experiment(path, overrides=["method=[fedaux,"])
    with pytest.raises(ConfigError, match=r"should be one setting; repeat --set for local\.epochs"):
        load_experiment(path, overrides=["rounds=3,local.epochs=5"])


DEMO, LITE = 'extends = "demo"\n', 'extends = "lite0"\n'
CNN = '[[prototypes]]\nname = "own"\nmodel = "cnn"\n'


@pytest.mark.parametrize(
    ("text", "change", "models", "encoder"),
    [
        (DEMO, "model=mlp", ["mlp"], None),
        (DEMO, "model=hf:./encoder", ["linear"], "hf:./encoder"),
        (DEMO + 'model = "mlp"\n', "rounds=1", ["mlp"], None),
        (LITE, "encoder.source=hf:./encoder", ["linear"], "hf:./encoder"),
        (LITE, "encoder.resize=pad", ["linear"], "efficientnet-lite0"),
        (LITE + CNN, "rounds=1", ["cnn"], None),
    ],
)
def test_of_two_networks_the_later_statement_counts(
    text: str, change: str, models: list[str], encoder: str | None
) -> None:
    experiment = load_experiment(text, overrides=[change])
    assert [one.model for one in experiment.prototypes] == models
    assert (experiment.encoder and experiment.encoder.source) == encoder
    if change == "model=mlp":
        (cell,) = cells_of(read_recipe(find_recipe("demo"))[0], [{"model": "mlp"}])
        assert [one.model for one in cell.experiment.prototypes] == models


@pytest.mark.parametrize(
    ("other", "key"), [(CNN, "prototypes"), ('[encoder]\nsource = "hf:b"\n', "encoder")]
)
def test_a_table_states_one_network(other: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"model = 'mlp': {key} states the network, too; should"):
        load_experiment('model = "mlp"\n' + other)


@pytest.mark.parametrize(
    ("key", "json", "toml"),
    [
        ("local.strengths", '{"rehearsal": 0.5}', "{rehearsal = 0.5}"),
        (
            "prototypes",
            '[{"name": "a", "model": "cnn", "options": {"width": 8}}]',
            '[{name = "a", model = "cnn", options = {width = 8}}]',
        ),
        ("certainty.components", "null", ""),
    ],
)
def test_json_is_refused_with_the_same_value_in_toml(key: str, json: str, toml: str) -> None:
    path = find_recipe("demo")
    with pytest.raises(ConfigError) as refused:
        load_experiment(path, overrides=[f"{key}={json}"])
    assert f"is JSON, and values are TOML; should be --set '{key}={toml}'" in str(refused.value)
    load_experiment(path, overrides=[f"{key}={toml}"])


def test_a_recipe_that_extends_nothing_or_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with pytest.raises(ConfigError, match="extends this recipe in turn"):
        load_experiment(tmp_path / "a.toml")
    (tmp_path / "c.toml").write_text('extends = "nobody"\n')
    with pytest.raises(ValueError, match=r"^demoo: no such file or recipe; did you mean demo\?$"):
        find_recipe("demoo")
    with pytest.raises(
        ValueError, match=r"^a\.tml: no such file or recipe; did you mean a\.toml\?$"
    ):
        find_recipe("a.tml", beside=tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    with pytest.raises(
        ValueError, match=r"^run: is a folder; .*recipe of its run is .*config\.toml"
    ):
        find_recipe("run", beside=tmp_path)
    with pytest.raises(ValueError, match="nobody: no such file or recipe; the recipes are agnews"):
        load_experiment(tmp_path / "c.toml")
    (tmp_path / "d.toml").write_text("extends = 3\n")
    with pytest.raises(ConfigError, match="should be the name or the path of a recipe"):
        load_experiment(tmp_path / "d.toml")


def test_an_experiment_from_a_name_a_text_and_a_path(tmp_path: Path) -> None:
    (tmp_path / "a=b.toml").write_text('extends = "demo"\nrounds = 7\n', encoding="utf-8")
    for recipe in (
        tmp_path / "a=b.toml",
        str(tmp_path / "a=b.toml"),
        'extends = "demo"\nrounds = 7',
    ):
        found = load_experiment(recipe)
        assert (found.rounds, found.split.num_clients) == (7, 10)
    assert load_experiment("rounds = 3").rounds == 3
    assert load_experiment("demo", overrides=["rounds=4"]).rounds == 4


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("demmo", "demmo: no such file or recipe; did you mean demo"),
        ("zzz", "zzz: no such file or recipe; the recipes are"),
        ("rounds = 0", "TOML text: 1 problem in the configuration\nrounds = 0"),
        ("rounds =\n", "TOML text: not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_name_or_a_text(recipe: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_experiment(recipe)


def test_a_key_below_the_wrong_table_is_told_where_it_belongs() -> None:
    _, found = inspect({"pretraining": {"mode": "linear"}})
    assert found == ["pretraining.mode: unknown key; mode belongs above the first table"]


def test_the_strength_of_the_proximal_term_has_one_name() -> None:
    (line,) = problems_of(tiny(local={"strengths": {"proximal": 5.0}}))
    assert line.startswith("local.strengths.proximal: should be local.proximal")


def test_recipes_of_old_run_directories_may_state_removed_keys_that_changed_nothing() -> None:
    older = {
        "distillation": {"schedule": "constant"},
        "batch_normalisation": {"server": "training"},
    }
    assert Experiment(pretraining={"redundancy": 0.005}, **older) == Experiment()


def test_thousands_of_wrong_keys_and_of_seeds_are_refused_at_once() -> None:
    """Each was compared with all others: 10,000 keys took minutes."""
    with pytest.raises(ConfigError) as error:
        load_experiment("\n".join(f"k{number} = 1" for number in range(10_000)))
    assert len(error.value.problems) == 201
    assert error.value.problems[-1] == "and 9800 more"
    with pytest.raises(ConfigError, match="1, 2 appears more than once"):
        load_experiment(f"seeds = [{'1, 2, ' * 50_000}]")


def test_a_path_that_no_file_can_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.path"):
        load_experiment(f"[data]\nsource = 'folder'\npath = '{'x' * 10_000}'")


def test_a_table_without_the_key_that_it_needs_is_named() -> None:
    for text in ("image_size = 8", "digest = 1"):
        with pytest.raises(ConfigError, match=r"encoder\.source: missing"):
            load_experiment(f"[encoder]\n{text}")


def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("a." * 100_000 + "b = 1\n")
    with pytest.raises(ConfigError, match="a key of more than 1000 parts"):
        load_experiment(tmp_path / "own.toml")
