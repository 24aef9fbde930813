"""Users' own rows from a file: added rows, refusals, and the record in a run."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
from helpers.experiments import TINY, tiny

import fedaux
from fedaux.core.algorithms import METHODS
from fedaux.recipes import merged
from fedaux.running import plugins
from fedaux.running.plugins import REGISTRIES, load_plugin, loaded

OWN = """\
from fedaux import METHODS
from fedaux.core.algorithms.feddf import FedDF
from fedaux.core.soft_labels import share_weights


class Own(FedDF):
    def soft_labels(self, server, state, members):
        return server.mix(members, share_weights(members))


METHODS["ours"] = Own("ours", memory=True)
"""

Write = Callable[..., Path]
pytestmark = [
    pytest.mark.usefixtures("without_pages"),
    pytest.mark.filterwarnings(
        "ignore:.*click:DeprecationWarning"
    ),  # of typer, where it is first imported
]


@contextmanager
def fresh() -> Iterator[None]:
    """Leave no plugin behind."""
    before = {name: dict(rows) for name, rows in REGISTRIES.items()}
    try:
        yield
    finally:
        plugins.LOADED.clear()
        for name, rows in before.items():
            REGISTRIES[name].clear()
            REGISTRIES[name].update(rows)


@pytest.fixture(autouse=True)
def _registries_as_before() -> Iterator[None]:
    with fresh():
        yield


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(content: str, name: str = "own.py") -> Path:
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return written


def refusal(path: Path) -> str:
    """Return why a plugin is refused, having seen that it left nothing behind."""
    before, modules = {name: dict(rows) for name, rows in REGISTRIES.items()}, set(sys.modules)
    with pytest.raises(ValueError, match="plugin ") as error:
        load_plugin(path)
    assert {name: dict(rows) for name, rows in REGISTRIES.items()} == before
    assert not [name for name in set(sys.modules) - modules if name.startswith("fedaux_plugin")]
    assert path not in [Path(plugin.path) for plugin in plugins.LOADED.values()]
    return str(error.value)


def test_rows_are_known_and_the_file_is_named_with_its_content(write: Write) -> None:
    path = write(OWN)
    module = fedaux.load_plugin(path)
    assert type(METHODS["ours"]) is module.Own
    assert loaded() == {str(path): hashlib.sha256(OWN.encode()).hexdigest()}
    assert list(path.parent.iterdir()) == [path]  # no compiled copy that could be run in its place


def test_code_of_a_plugin_is_an_ordinary_module(write: Write) -> None:
    content = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n"
        "@dataclass\nclass Pair:\n    first: int\n    second: int = 2\n"
    )
    assert load_plugin(write(content)).Pair(1).second == 2
    # Postponed evaluation is not inherited from the loader.
    unquoted = "def f(x: int) -> int:\n    return x\n"
    assert load_plugin(write(unquoted, "other.py")).f.__annotations__["x"] is int


def test_a_file_loaded_again_replaces_its_own_rows(write: Write) -> None:
    load_plugin(write(OWN))
    load_plugin(write(OWN))
    load_plugin(write(OWN.replace('"ours"', '"theirs"')))
    assert "theirs" in METHODS
    assert "ours" not in METHODS
    assert len(loaded()) == 1
    with pytest.raises(ValueError, match="SyntaxError"):
        load_plugin(write("=", "own.py"))
    assert "theirs" in METHODS  # a file that fails leaves what its last version gave


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path / "no.py")
        == f"plugin {tmp_path / 'no.py'}: cannot be read (No such file or directory)"
    )
    assert refusal(tmp_path) == f"plugin {tmp_path}: cannot be read (Is a directory)"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (OWN + "1 / 0\n", ":12: fails with ZeroDivisionError: division by zero"),
        (
            "def f():\n    import json\n    json.loads('x')\n\n\nf()\n",
            ":3: fails with JSONDecodeError: Expecting value",
        ),
        ("x = 1\nif x\n", ":2: fails with SyntaxError: expected ':'"),
        ("import not_there\n", ":1: fails with ModuleNotFoundError: No module named 'not_there'"),
        ("raise SystemExit\n", ":1: fails with SystemExit"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(content: str, said: str, write: Write) -> None:
    path = write(content)
    assert refusal(path).startswith(f"plugin {path}{said}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('METHODS["fedavg"] = Own("fedavg")', "METHODS['fedavg'] is a row that ships with"),
        ('del METHODS["fedprox"]', "METHODS['fedprox'] is a row that ships with"),
        (
            'METHODS["x"] = Own("x", objectives=("fedlx",))',
            "METHODS['x'].objectives = 'fedlx': not known; did you mean fedlc?",
        ),
        (
            'METHODS["x"] = Own("x", objectives=("zzz",))',
            "METHODS['x'].objectives = 'zzz': not known; there are proximal, logit-adjusted",
        ),
        ('METHODS["x"] = Own("y")', "METHODS['x'].name = 'y': should be 'x'"),
        ('METHODS["x/y"] = Own("x/y")', "METHODS['x/y']: is the name of a directory"),
        ('METHODS["x"] = "fedavg"', "METHODS['x'] = 'fedavg': should be a fedaux.Method"),
        (
            'import fedaux\nMETHODS["x"] = fedaux.Method("x")',
            "METHODS['x'].asks fails with NotImplementedError",
        ),
        (
            'Own.asks = lambda self, settings: None\nMETHODS["x"] = Own("x")',
            "METHODS['x'].asks returns None: should be a fedaux.core.asks.Asks",
        ),
        ('SOURCES["x"] = Source()', "SOURCES['x']: should have load_labelled"),
        ('SOURCES["x"] = Source(load_labelled=print)', "SOURCES['x'].count_labelled: missing"),
        ('SOURCES["x"] = print', "should be a fedaux.data.Source"),
        (
            'OBJECTIVES["x"] = Objective(adjust=lambda counts, strength: counts)',
            "OBJECTIVES['x'].adjust returns tensor([3., 1., 0.]): should be scale and offset",
        ),
        (
            'OBJECTIVES["x"] = Objective(adjust=lambda counts, strength: (counts, counts.log()))',
            "OBJECTIVES['x'].adjust, second, returns [3] for four examples of three classes; "
            "should be finite numbers [3]",
        ),
        (
            'OBJECTIVES["x"] = Objective(term=lambda f, y, q, p: f.mean())',
            "OBJECTIVES['x'].term returns [] for four examples of three classes; should be finite "
            "numbers [4]",
        ),
        (
            'OBJECTIVES["x"] = Objective(term=lambda f, y, q, p: f @ q)',
            "OBJECTIVES['x'] fails on four examples of three classes with RuntimeError: mat1",
        ),
        (
            'SOURCES["none"] = Source(load_auxiliary=print)',
            "SOURCES['none']: is reserved for no data",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused(line: str, said: str, write: Write) -> None:
    imports = "from fedaux.core.objectives import OBJECTIVES, Objective\n"
    path = write(f"{OWN}{imports}from fedaux.data import SOURCES, Source\n{line}\n")
    assert said in refusal(path)
    assert refusal(path).startswith(f"plugin {path}: ")


def test_all_wrong_rows_are_told_at_once(write: Write) -> None:
    path = write(OWN + 'METHODS["y"] = 3\nMETHODS["x"] = Own("x", objectives=("zzz",))\n')
    assert len(refusal(path).splitlines()) == 2


def test_an_identical_row_is_no_offence_and_another_plugins_row_is_its_own(write: Write) -> None:
    same = write(OWN + 'METHODS["feddf"] = FedDF("feddf")\n')
    load_plugin(same)
    other = write(
        "from fedaux import METHODS\nfrom fedaux.core.algorithms.feddf import FedDF\n"
        'METHODS["ours"] = FedDF("ours", mix="probabilities")\n',
        "b.py",
    )
    assert f"METHODS['ours'] is a row of the plugin {same}; choose another name" in refusal(other)


def test_resuming_needs_the_same_plugin(write: Write, tmp_path: Path) -> None:
    experiment = tiny(method=["ours"], rounds=1)
    load_plugin(write(OWN))
    out = tmp_path / "run"
    fedaux.run(experiment, out=out)
    environment = json.loads((out / "environment.json").read_text())
    assert environment["plugins"] == {
        str(tmp_path / "own.py"): hashlib.sha256(OWN.encode()).hexdigest()
    }
    load_plugin(write(OWN, "moved.py").rename(tmp_path / "own.py"))  # the same content
    fedaux.run(experiment, out=out, resume=True)
    load_plugin(write(OWN + "# changed\n"))
    with pytest.raises(
        ValueError, match=r"was started with the plugin .*own\.py \(SHA-256 .*has changed"
    ):
        fedaux.run(experiment, out=out, resume=True)
    assert json.loads((out / "environment.json").read_text())["plugins"] == environment["plugins"]


def test_a_run_without_plugins_does_not_mention_them(tmp_path: Path) -> None:
    fedaux.run(tiny(method=["fedavg"], rounds=1), out=tmp_path / "run")
    assert "plugins" not in json.loads((tmp_path / "run/environment.json").read_text())


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """The command line in this process: exit status, output, errors. Each call begins without
    plugins."""
    from fedaux.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")

    def called(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedaux", *arguments])
        with fresh(), pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), *capsys.readouterr()

    return called


def test_commands_take_plugins_and_say_what_they_are(
    write: Write, command: Command, tmp_path: Path
) -> None:
    write(OWN)
    more = 'METHODS["more"] = replace(METHODS["ours"], name="more")\n'
    write(f"from dataclasses import replace\n\nfrom fedaux import METHODS\n\n{more}", "b.py")
    write(tomli_w.dumps(merged(TINY, {"method": ["ours", "more"], "rounds": 1})), "recipe.toml")
    both = ("--plugin", "own.py", "--plugin", "b.py")
    status, _, errors = command("run", "recipe.toml", *both)
    assert (status, errors) == (0, "")
    summary = json.loads((tmp_path / "runs/tiny/summary.json").read_text())
    assert [row["method"] for row in summary["rows"]] == ["ours", "more"]
    listed = command("methods", *both)[1].split()
    assert listed.index("ours") < listed.index("more")
    assert "ours, more" in command("privacy", "recipe.toml", *both)[1]
    assert command("data", "recipe.toml", *both)[0] == 0
    assert command("run", "recipe.toml", "--resume", *both)[0] == 0

    status, _, errors = command("run", "recipe.toml", "--resume")
    assert status == 2
    lines = errors.splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == ["method = 'ours'", "method = 'more'"]
    assert all(line.endswith("; if a plugin adds it, use --plugin FILE") for line in lines)
    status, _, errors = command("run", "recipe.toml", "--plugin", "b.py", "--plugin", "own.py")
    assert status == 2
    assert errors.startswith("error: plugin b.py:5: fails with KeyError: 'ours'")
    assert "executed with your rights" in command("run", "--help")[1]


@pytest.mark.slow
def test_an_own_mechanism_can_be_attacked(write: Write, command: Command) -> None:
    write(
        "from fedaux.privacy.mechanisms import MECHANISMS\nMECHANISMS['copy'] = "
        "MECHANISMS['mean']\n"
    )
    status, output, errors = command(
        "audit",
        "--mechanism",
        "copy",
        "--epsilon",
        "1",
        "--trials",
        "20000",
        "--releases",
        "40",
        "--json",
        "--plugin",
        "own.py",
    )
    assert status == 0, errors
    assert json.loads(output)["mechanism"] == "copy"


@pytest.mark.parametrize(
    "name", ["run", "data", "privacy", "methods", "audit", "reproduce toy-iris"]
)
def test_a_failing_plugin_is_told_in_one_line(name: str, write: Write, command: Command) -> None:
    write("x = 1\ny = x.z\n")
    status, output, errors = command(*name.split(), "--plugin", "own.py")
    assert (status, output) == (2, "")
    assert (
        errors
        == "error: plugin own.py:2: fails with AttributeError: 'int' object has no attribute 'z'\n"
    )
