"""The folder of a federation, and what a node would do."""

from __future__ import annotations

import re
import tomllib
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federate_trial import federate_command, write_trial
from helpers.paths import ROOT
from rich.console import Console

from fedaux.config import ConfigError
from fedaux.core.dpsgd import update_entry
from fedaux.data import load_labelled
from fedaux.federation.check import check_node
from fedaux.federation.flower_internals.processes import port_of
from fedaux.federation.folder import write_folder
from fedaux.federation.node import load_node
from fedaux.federation.policy import Guard
from fedaux.federation.work import own_data
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.ledger import SCORES, LedgerEntry
from fedaux.recipes import load_experiment
from fedaux.running.run import split_for

# The folder.


def test_a_trial_has_everything_and_its_recipe_is_the_simulators(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "hospitals", recipe="demo", clients=3, trial=True)
    folder = tmp_path / "hospitals"
    assert sorted(path.relative_to(folder).as_posix() for path in files) == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    experiment = load_experiment(folder / "app/recipe.toml")
    assert (experiment.name, experiment.method, experiment.seeds) == (
        "hospitals",
        ("fedaux",),
        (0,),
    )
    assert (experiment.split.num_clients, experiment.participation_rate) == (3, 1.0)
    assert experiment.pretraining == load_experiment(ROOT / "recipes/demo.toml").pretraining
    for client in range(3):
        node = tomllib.loads((folder / f"nodes/node-{client}.toml").read_text())
        assert node["client"] == client
        assert node["privacy"]["noise"] == "simulated"
        assert (node["privacy"]["epsilon"], node["privacy"]["delta"]) == (0.5, 1e-5)
        assert node["split"] == {"num_clients": 3, "alpha": 0.01, "seed": 0}
    assert not (folder / "nodes/node-3.toml").exists()
    assert "client" not in tomllib.loads((folder / "nodes/simulation.toml").read_text())
    project = tomllib.loads((folder / "app/pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert set(project["tool"]["flwr"]["app"]["config"]) == {"recipe", "out", "resume", "set"}


def test_a_trial_reads_as_much_as_the_simulator(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text('extends = "demo"\n[data]\nsize = 400\ntest_size = 100\n')
    write_folder(tmp_path / "trial", recipe=str(recipe), clients=2, trial=True)
    nodes = [load_node(tmp_path / f"trial/nodes/node-{client}.toml") for client in range(2)]
    assert sum(own_data(node)[1] for node in nodes) == 400
    recipe.write_text('extends = "demo"\n[data]\nserver_validation = 100\n')
    with pytest.raises(ValueError, match=r"data\.server_validation is not supported there"):
        write_folder(tmp_path / "other", recipe=str(recipe), clients=2, trial=True)


def test_a_trial_does_not_ignore_a_refusal_of_plain_updates(tmp_path: Path) -> None:
    done = federate_command("init", "trial", "--trial", "--no-plain-updates", cwd=tmp_path)
    assert done.returncode == 2
    assert "--no-plain-updates: a trial sends plain updates" in done.stderr
    assert not (tmp_path / "trial").exists()


def test_a_method_with_two_releases_gets_a_budget_for_both(tmp_path: Path) -> None:
    recipe = tmp_path / "private.toml"
    recipe.write_text(
        'extends = "demo"\nmethod = ["fedauxfdp"]\nseeds = [0]\n[certainty]\nepsilon = 0.1\n'
    )
    write_folder(tmp_path / "hospitals", recipe=str(recipe), clients=2, trial=False)
    terms = tomllib.loads((tmp_path / "hospitals/nodes/node-1.toml").read_text())["privacy"]
    assert terms["mechanisms"] == ["mean", "heads"]
    assert (terms["epsilon"], terms["delta"]) == (0.6, 2e-5)
    assert terms["plain_updates"] is False


def test_without_trial_nodes_read_their_own_data_and_protect_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "hospitals", recipe="demo", clients=2, trial=False)
    node = tomllib.loads((tmp_path / "hospitals/nodes/node-1.toml").read_text())
    assert node["privacy"]["noise"] == "secure"
    assert node["privacy"]["mechanisms"] == ["mean"]
    assert "split" not in node
    assert node["data"]["path"] == "/path/to/your/images"
    assert (node["data"]["image_size"], node["data"]["channels"]) == (
        8,
        1,
    )  # the classes of the server's test images
    assert node["classes"] == [str(digit) for digit in range(10)]
    assert node["privacy"]["plain_updates"] is False
    assert node["privacy"]["public_data"] is False
    assert node["privacy"]["accountant"] == "gaussian"
    write_folder(tmp_path / "open", recipe="demo", clients=2, trial=False, plain_updates=True)
    assert (
        tomllib.loads((tmp_path / "open/nodes/node-1.toml").read_text())["privacy"]["plain_updates"]
        is True
    )


def test_init_asks_whether_unprotected_models_may_leave(tmp_path: Path) -> None:
    done = federate_command("init", "hospitals", cwd=tmp_path)
    assert done.returncode == 2
    assert "--plain-updates" in done.stderr
    assert not (tmp_path / "hospitals").exists()
    for option, allowed in (("--plain-updates", True), ("--no-plain-updates", False)):
        assert federate_command("init", f"with{option[2:4]}", option, cwd=tmp_path).returncode == 0
        node = tomllib.loads((tmp_path / f"with{option[2:4]}/nodes/node-0.toml").read_text())
        assert node["privacy"]["plain_updates"] is allowed


def test_an_own_recipe_keeps_its_settings_and_its_clients_get_their_paths(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        'method = ["fedaux", "fedavg+p"]\nseeds = [0, 1]\nrounds = 2\n[certainty]\nepsilon = 0.25\n'
        '[data]\nsource = "folder"\nimage_size = 16\ntest = "tests"\n'
        'clients = ["/data/a", "/data/b"]\n[local.privacy]\nnoise_multiplier = 2.0\n'
    )
    write_folder(tmp_path / "clinics", recipe=str(tmp_path / "own.toml"), clients=None, trial=False)
    recipe = tomllib.loads((tmp_path / "clinics/app/recipe.toml").read_text())
    assert (recipe["rounds"], recipe["certainty"]["epsilon"]) == (2, 0.25)
    assert "clients" not in recipe["data"]
    assert recipe["split"]["num_clients"] == 2
    assert recipe["name"] == "own"
    node = tomllib.loads((tmp_path / "clinics/nodes/node-1.toml").read_text())
    assert node["data"] == {"source": "folder", "image_size": 16, "path": "/data/b"}
    assert node["privacy"]["epsilon"] == 0.5  # two seeds of the one method that releases scores
    assert node["privacy"]["plain_updates"] is False
    assert node["privacy"]["accountant"] == "renyi"
    with pytest.raises(ValueError, match=r"--clients 3: the recipe's data.clients names 2"):
        write_folder(tmp_path / "other", recipe=str(tmp_path / "own.toml"), clients=3, trial=False)
    with (tmp_path / "own.toml").open("a") as file:
        file.write("[split]\nnum_clients = 3\n")
    with pytest.raises(ConfigError, match=r"split\.num_clients = 3: should be 2"):
        write_folder(
            tmp_path / "other", recipe=str(tmp_path / "own.toml"), clients=None, trial=False
        )


def test_nothing_is_overwritten_and_names_are_checked(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used/note").write_text("mine")
    done = federate_command("init", "used", "--plain-updates", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path / 'used'} exists already and is not overwritten; choose another "
        "name\n"
    )
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["note"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "x"}, "x: no such file or recipe"),
        ({"clients": 0}, "--clients 0: should be at least 1"),
        ({"port": 70000}, "--port 70000: should be"),
    ]
    settings: dict[str, Any] = {"recipe": "demo", "clients": 2, "trial": True}
    for changes, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            write_folder(tmp_path / "new", **(settings | changes))
    with pytest.raises(ValueError, match="should be a letter, then"):
        write_folder(tmp_path / "3_hospitals", recipe="demo", clients=2, trial=True)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


@pytest.mark.parametrize("trial", [False, True])
def test_nodes_need_to_know_what_kind_of_data_they_have(tmp_path: Path, trial: bool) -> None:
    recipe = tmp_path / "public.toml"
    recipe.write_text('[auxiliary]\nsource = "folder"\npath = "public"\n')
    words = [
        "init",
        "hospitals",
        "--recipe",
        "public.toml",
        "--trial" if trial else "--plain-updates",
    ]
    done = federate_command(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "data: required except by `fedaux pretrain`; data.source should be digits" in done.stderr
    assert not (tmp_path / "hospitals").exists()
    recipe.write_text(recipe.read_text() + '[data]\nsource = "folder"\ntest = "tests"\n')
    write_folder(tmp_path / "hospitals", recipe=str(recipe), clients=None, trial=trial)
    assert (
        tomllib.loads((tmp_path / "hospitals/nodes/node-0.toml").read_text())["data"]["source"]
        == "folder"
    )


def test_the_server_listens_where_flower_will_look(tmp_path: Path) -> None:
    write_folder(tmp_path / "hospitals", recipe="demo", clients=2, trial=True, port=8123)
    assert port_of(tmp_path / "hospitals", simulation=False) == 8123
    assert port_of(tmp_path / "hospitals", simulation=True) == 8223


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_builds_the_app_and_no_secret_travels(tmp_path: Path) -> None:
    build = pytest.importorskip("flwr.cli.build")
    import io
    import zipfile

    write_folder(tmp_path / "hospitals", recipe="demo", clients=3, trial=True)
    bundle = zipfile.ZipFile(io.BytesIO(build.build_fab_from_disk(tmp_path / "hospitals/app")))
    names = {name for name in bundle.namelist() if not name.startswith(".info")}
    modules = {f"fedaux_app/{name}.py" for name in ("__init__", "server_app", "client_app")}
    assert names == {"pyproject.toml", "recipe.toml", *modules}


# What a node would do.


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return write_trial(tmp_path / "hospitals")


def changed(file: Path, old: str, new: str) -> Path:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return file


def text_of(parts: list[Any]) -> str:
    console = Console(width=140, record=True, file=StringIO())
    for part in parts:
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    return console.export_text()


def test_check_says_what_a_node_holds_and_what_would_leave_it(node: Path) -> None:
    said, willing = check_node(node, recipe=str(node.parents[1] / "app/recipe.toml"))
    text = text_of(said)
    experiment = load_experiment(node.parents[1] / "app/recipe.toml")
    labelled = load_labelled(experiment.data)
    held = np.asarray(labelled.labels)[split_for(experiment, labelled, 0)[1]]
    assert willing
    assert f"Client 1: {len(held)} examples, images 1 x 8 x 8" in text
    for label, count in zip(*np.unique(held, return_counts=True), strict=True):
        assert re.search(rf"│ {label} +│ +{count} │", text)
    assert text.startswith(
        "NOT PROTECTED: privacy.plain_updates = true lets trained models leave without"
    )
    assert "NOT PRIVATE: privacy.noise = simulated" in text
    assert "A trial: [split] gives this node" in text
    assert "(ε, δ) = (0.5, 1e-5), 1 time, once per seed" in text
    assert "Within the budget: total ε = 0.5 at δ = 1e-05." in text
    assert not (node.parent / "state-1").exists()  # looking leaves nothing behind


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "epsilon = 0.5",
            "epsilon = 0.4",
            "this request does not fit this node's privacy budget (certainty.epsilon = 0.5, ",
        ),
        (
            '["mean"]',
            '["paper"]',
            "certainty.mechanism = mean: not allowed by this node (privacy.mechanisms allows ",
        ),
        (
            "plain_updates = true",
            "plain_updates = false",
            "updates without DP-SGD do not leave this node",
        ),
    ],
)
def test_check_foretells_a_refusal(node: Path, old: str, new: str, reason: str) -> None:
    changed(node, old, new)
    said, willing = check_node(node, recipe=str(node.parents[1] / "app/recipe.toml"))
    assert not willing
    assert f"REFUSED: {reason}" in text_of(said)
    assert check_node(node)[1]  # of itself, nothing is wrong with the node


def test_a_recipe_that_rehearses_asks_for_it_and_may_be_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'extends = "demo"\nmethod = ["fedaux2"]\n[certainty]\ncomponents = 8\n'
        "[rehearsal]\nexamples = 500\n"
    )
    write_folder(tmp_path / "clinics", recipe=str(recipe), clients=3, trial=True)
    node = tmp_path / "clinics/nodes/node-1.toml"
    said, willing = check_node(node, recipe=str(recipe))
    text = text_of(said)
    assert willing
    assert "Public images of the server, to rehearse in training, are taken and kept" in text
    assert "- training with jointly-adjusted, besides cross-entropy;" in text
    assert "- to keep 500 public images and rehearse 96 of them in each batch" in text
    changed(node, "public_data = true", "public_data = false")
    said, willing = check_node(node, recipe=str(recipe))
    assert not willing
    assert "are refused." in text_of(said)
    assert "REFUSED: local.objectives = rehearsal: this node takes no public data" in text_of(said)


def test_check_counts_what_was_spent_before_and_what_training_would_cost(node: Path) -> None:
    pytest.importorskip("dp_accounting")
    config = load_node(node)
    planned = (1.0, noise_multiplier(epsilon=0.5, delta=1e-5), 0.5, 1e-5, "planned")
    entry = LedgerEntry(config.number, 474, "mean", SCORES, *planned)
    Guard(config).store_release("0" * 64, torch.zeros(3), entry)
    said, willing = check_node(node, recipe=str(node.parents[1] / "app/recipe.toml"))
    assert not willing
    assert "of which 0.5 is spent (1 releases" in text_of(said)
    assert "the whole run, with earlier releases, costs epsilon = 0.7" in text_of(said)

    (node.parents[1] / "dp.toml").write_text(
        'method = ["fedavg"]\nrounds = 4\nparticipation_rate = 1.0\n[split]\nnum_clients = '
        "3\n[local.privacy]\nnoise_multiplier = 40.0\n"
    )
    changed(node, "epsilon = 0.5", "epsilon = 5.0")
    said, willing = check_node(node, recipe=str(node.parents[1] / "dp.toml"))
    experiment = load_experiment(node.parents[1] / "dp.toml")
    examples = own_data(config)[1]
    update = update_entry(experiment.local, num_examples=examples, client=1, noise="simulated")
    assert willing
    assert f"total ε = {Guard(load_node(node)).spent([entry, *[update] * 4]):.4g} " in text_of(said)


def test_the_exit_status_of_check_is_the_nodes_answer(node: Path) -> None:
    changed(node, "epsilon = 0.5", "epsilon = 0.4")
    done = federate_command(
        "check", str(node), "--recipe", str(node.parents[1] / "app/recipe.toml"), cwd=node.parent
    )
    assert done.returncode == 1
    assert "certainty.epsilon = 0.5, and privacy.epsilon = 0.4" in done.stdout


def test_check_tells_all_mistakes_at_once(node: Path) -> None:
    changed(node, "epsilon = 0.5", "epsilonn = 0.5")
    changed(node, 'noise = "simulated"', 'noise = "loud"')
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*did you mean privacy.epsilon\?"):
        check_node(node)
