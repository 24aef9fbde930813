"""A node's configuration, its ledger, and the records that cross the network."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaux.config import Certainty, ConfigError, Experiment, LocalPrivacy
from fedaux.federation.node import NodeConfig, keep_policy, load_node, load_started
from fedaux.federation.policy import Guard, Refusal, digest_of
from fedaux.privacy.gaussian import delta_of
from fedaux.privacy.ledger import SCORES, LedgerEntry


def node(tmp_path: Path, text: str, **keywords: Any) -> NodeConfig:
    file = tmp_path / "node.toml"
    declared = "" if "classes" in text else 'classes = ["a", "b"]\n'
    file.write_text(declared + text)
    return load_node(file, **keywords)


def guard(tmp_path: Path, privacy: str = "") -> Guard:
    return Guard(node(tmp_path, f'client = 3\n[data]\nsource = "digits"\n[privacy]\n{privacy}\n'))


def entry(epsilon: float = 0.5, *, delta: float = 1e-5) -> LedgerEntry:
    from fedaux.privacy.gaussian import noise_multiplier

    sigma = 0.02 * noise_multiplier(epsilon=epsilon, delta=delta)
    return LedgerEntry(3, 100, "mean", SCORES, 0.02, sigma, epsilon, delta, "secure")


def test_paths_are_beside_the_file_and_the_client_may_come_from_flower(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    config = node(
        tmp_path,
        '[data]\nsource = "folder"\npath = "images"\nimage_size = 8\nchannels = 1\n',
        partition=7,
    )
    assert config.number == 7
    assert config.data.path == str(tmp_path / "images")
    assert config.folder == tmp_path / "state" / "client-00007"
    assert config.privacy.noise == "secure"
    assert config.privacy.mechanisms == ("mean", "paper")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            '[data]\nsource = "digits"\n',
            "client: missing; the number of this client, from 0 upwards",
        ),
        ("client = 0\n", "data: missing"),
        (
            'client = -1\n[data]\nsource = "digits"\n',
            "client = -1: should be greater than or equal to 0",
        ),
        (
            'client = 0\n[data]\nsource = "digits"\n[privacy]\nepsilonn = 1\n',
            "privacy.epsilonn: unknown key; did you mean",
        ),
        (
            'client = 0\n[data]\nsource = "digits"\n[privacy]\nnoise = "none"\n',
            "privacy.noise = \"none\": should be 'secure'",
        ),
        ('client = 0\n[data]\nclients = ["a"]\n', "data.clients: a node has only its own data"),
        (
            "client = 4\n[data]\n[split]\nnum_clients = 4\nalpha = 1.0\n",
            "client = 4: there are 4 parts",
        ),
        ("client =\n", "not valid TOML"),
        ("client = " + "[" * 3000 + "]" * 3000, "not valid TOML"),
        ("client." + "a." * 900 + "b = 1", "should be at most 16 deep"),
        (
            'client = 0\nclasses = []\n[data]\nsource = "digits"\n',
            "classes: missing; the names of all classes",
        ),
        ('client = 0\nclasses = ["a", "a"]\n[data]\n', "should be different names"),
        (
            'client = 0\n[data]\nsource = "folder"\npath = "x"\nchannels = 1\n',
            "data.image_size: missing",
        ),
        (
            'client = 0\n[data]\nsource = "folder"\npath = "x"\nimage_size = 8\n',
            "data.channels: missing",
        ),
        ('client = 0\n[data]\nencoding = "latin-1"\n', "data.encoding: a node reads UTF-8 only"),
        ('client = 0\nstate = ""\n[data]\n', 'state = "": is empty; should be'),
        (
            "client = 0\n[data]\n[privacy]\nepsilon = 1e-6\n",
            "privacy.epsilon = 1e-06: should be between 0.001",
        ),
        ('client = 0\n[data]\n[privacy]\nmechanisms = ["release"]\n', "called `released-code`"),
        (
            "client = 0\n[data]\n[privacy]\ndelta = 1e-40\n",
            "privacy.delta = 1e-40: should be between 1e-12",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        node(tmp_path, text)
    assert line in str(caught.value)


def test_a_stored_release_is_given_again_and_costs_nothing(tmp_path: Path) -> None:
    vector = torch.tensor([0.1, 1 / 3], dtype=torch.float64)
    own = guard(tmp_path, "epsilon = 0.6")
    assert own.stored_release("a" * 64) is None
    own.alone().__enter__()
    own.store_release("a" * 64, vector, entry())
    stored = guard(tmp_path, "epsilon = 0.6").stored_release("a" * 64)  # as after a restart
    assert stored is not None
    assert torch.equal(stored[0], vector)
    assert stored[1] == entry()
    with pytest.raises(Refusal, match="does not fit this node's privacy budget") as refused:
        own.store_release("b" * 64, vector, entry())
    assert "0.5 of it already spent; privacy.epsilon = 0.6" in refused.value.detail
    assert len(own.entries()) == 1
    assert own.stored_release("b" * 64) is None


def test_budgets_are_composed_by_the_package_itself(tmp_path: Path) -> None:
    own = guard(tmp_path, "epsilon = 1.0\ndelta = 2e-5")
    with own.alone():
        own.store_release("a" * 64, torch.zeros(1), entry())
        own.store_release("b" * 64, torch.zeros(1), entry())
    together = own.spent(own.entries())
    assert 0.5 < together <= 1.0
    assert delta_of(
        together, noise_multiplier=entry().sigma / entry().sensitivity / 2**0.5
    ) == pytest.approx(2e-5)
    with own.alone(), pytest.raises(Refusal):
        own.store_release("c" * 64, torch.zeros(1), entry(0.9))


def test_an_update_counts_whatever_epsilon_it_states(tmp_path: Path) -> None:
    """The server chooses the delta at which an update states its own epsilon, which may then be
    infinite."""
    held = guard(tmp_path, "accountant = 'renyi'")
    update = replace(
        entry(),
        epsilon=math.inf,
        mechanism="dp-sgd",
        sensitivity=2.0,
        sigma=80.0,
        steps=8,
        sampling_probability=1.0,
    )
    rounds = 0
    with pytest.raises(Refusal):  # noqa: PT012
        while rounds < 1000:
            held.store_answer(
                str(rounds), {"weights/x": torch.zeros(1)}, run="r", about={}, entry=update
            )
            rounds += 1
    assert rounds >= 1
    assert len(held.counted()) == rounds


def test_a_smaller_delta_than_was_spent_is_not_made_up(tmp_path: Path) -> None:
    own = guard(tmp_path, "epsilon = 0.5\ndelta = 1e-9")
    with own.alone(), pytest.raises(Refusal) as refused:
        own.store_release("a" * 64, torch.zeros(1), entry())
    assert "at delta = 1e-09" in refused.value.detail


def test_a_write_that_is_cut_off_leaves_the_old_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = guard(tmp_path, "epsilon = 5.0")
    with own.alone():
        own.store_release("a" * 64, torch.zeros(1), entry())

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            own.store_release("b" * 64, torch.zeros(1), entry())
    monkeypatch.undo()
    assert len(own.entries()) == 1
    assert own.stored_release("b" * 64) is None


def test_a_damaged_ledger_stops_everything(tmp_path: Path) -> None:
    own = guard(tmp_path)
    with own.alone():
        own.store_release("a" * 64, torch.zeros(1), entry())
    (tmp_path / "state" / "client-00003" / "ledger.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        own.entries()


def test_only_one_message_at_a_time_spends(tmp_path: Path) -> None:
    import threading

    own, order = guard(tmp_path), []

    def second() -> None:
        with guard(tmp_path).alone():
            order.append("second")

    with own.alone():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]


def test_kept_moments_belong_to_one_run(tmp_path: Path) -> None:
    own = guard(tmp_path)
    tensors = {"weights/a": torch.ones(2), "kept/a/exp_avg": torch.full((2,), 3.0)}
    with own.alone():
        own.store_answer(
            "a" * 64, tensors, run="one", about={"num_examples": 5, "loss": 1.5}, entry=None
        )
    assert torch.equal(own.kept("one")["a/exp_avg"], torch.full((2,), 3.0))
    assert own.kept("another") == {}
    stored = own.stored_answer("a" * 64)
    assert stored is not None
    assert stored[1]["loss"] == 1.5
    assert own.stored_answer("b" * 64) is None


def test_h0_is_what_its_digest_says(tmp_path: Path) -> None:
    own = guard(tmp_path)
    weights = {"layer": torch.randn(3, 2)}
    own.keep_received("extractor", weights)
    digest = digest_of("extractor", weights)
    held = own.received("extractor", digest)
    assert held is not None
    assert torch.equal(held["layer"], weights["layer"])
    assert own.received("extractor", "../" + "0" * 61) is None
    own.keep_received("extractor", {"layer": torch.zeros(3, 2)})
    assert own.received("extractor", digest) is None


def test_unprotected_updates_can_be_forbidden(tmp_path: Path) -> None:
    from fedaux.config import Local

    own = guard(tmp_path, "plain_updates = false")
    with pytest.raises(Refusal, match="do not leave this node"):
        own.check_update(Local())
    own.check_update(Local(privacy=LocalPrivacy()))


def test_a_model_too_large_is_refused_before_it_is_built() -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    from fedaux.config import Certainty, Prototype
    from fedaux.federation.terms import Plan, PrepareTerms
    from fedaux.federation.work import blank_model

    def terms(**options: Any) -> PrepareTerms:
        return PrepareTerms(
            client=0,
            run="r",
            plan=Plan(run="r"),
            seed=0,
            prototype=Prototype(name="p", model="cnn", options=options),
            mode="full",
            image_shape=(1, 8, 8),
            classes=("a", "b"),
            certainty=Certainty(),
        )

    blank_model(terms(width=4), most_bytes=10**6)
    with pytest.raises(Refusal, match="more than this node accepts"):
        blank_model(terms(width=100_000), most_bytes=10**6)
    with pytest.raises(Refusal, match="no such option"):
        blank_model(terms(path="/etc/passwd"), most_bytes=10**6)
    with pytest.raises(Refusal, match="not known here"):
        blank_model(
            terms().model_copy(update={"prototype": Prototype(name="p", model="os.system")}),
            most_bytes=10**6,
        )
    for model, options in (("minilm", {}), ("bert", {"checkpoint": "/etc"})):
        prototype = Prototype(name="p", model=model, options=dict(options))
        with pytest.raises(Refusal, match="models of images"):
            blank_model(terms().model_copy(update={"prototype": prototype}), most_bytes=10**9)


def test_records_hold_every_bit_and_nothing_else() -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    from flwr.app import RecordDict

    from fedaux.federation import records

    weights = {
        "a": torch.randn(3, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 5),
        "double": torch.randn(2, dtype=torch.float64),
    }
    back = records.tensors(records.arrays(weights), records.expected_of(weights))
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    half = records.tensors(
        records.arrays(weights, wire="fp16"), records.expected_of(weights), wire="fp16"
    )
    assert torch.equal(half["a"], weights["a"].half().float())
    assert torch.equal(half["double"], weights["double"])
    sent = [RecordDict({"w": records.arrays(weights, wire=wire)}) for wire in ("fp16", "fp32")]
    sizes = [records.size_of(content) for content in sent]
    assert sizes[1] - sizes[0] == 3 * 4 * 2  # the header is as long
    with pytest.raises(records.Unusable, match=r"is float16 \[3, 4\], should be float32 \[3, 4\]"):
        records.tensors(records.arrays(weights, wire="fp16"), records.expected_of(weights))


def test_large_numbers_survive_half_precision() -> None:
    from fedaux.core.messages import as_received

    weights = {"v": torch.tensor([1e6, -1e6, 0.1]), "n": torch.tensor([float("inf"), float("nan")])}
    received = as_received(weights, wire="fp16")
    assert received["v"].tolist()[:2] == [65504.0, -65504.0]
    assert received["n"].isinf().tolist() == [True, False]
    assert received["n"].isnan().tolist() == [False, True]


def test_the_account_of_half_precision_is_half() -> None:
    from fedaux.core.messages import num_bytes

    weights = {"a": torch.zeros(10), "n": torch.zeros(3, dtype=torch.int64)}
    assert num_bytes(weights) == 40 + 24
    assert num_bytes(weights, wire="fp16") == 20 + 24


def test_waiting_may_change_when_a_run_goes_on_and_the_wire_may_not() -> None:
    one = Experiment(federation={"deadline": 5.0})
    assert one.sha256() == Experiment().sha256()
    assert Experiment(federation={"wire": "fp16"}).sha256() != Experiment().sha256()


def test_a_ledger_is_plain_json(tmp_path: Path) -> None:
    own = guard(tmp_path)
    with own.alone():
        own.store_release("a" * 64, torch.zeros(1), entry())
    ledger = json.loads((tmp_path / "state" / "client-00003" / "ledger.json").read_text())
    assert ledger["spent"][0]["entry"]["epsilon"] == 0.5
    assert ledger["spent"][0]["file"] == f"release-{'a' * 64}.safetensors"


def test_a_policy_is_read_once_and_a_change_waits_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = 'client = 3\n[data]\nsource = "digits"\n[privacy]\nepsilon = 0.5\n'
    started = node(tmp_path, text)
    file = tmp_path / "node.toml"
    assert started.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    for name, value in keep_policy(file, started).items():
        monkeypatch.setenv(name, value)
    assert load_started(file) == started
    assert not caplog.records
    node(tmp_path, text.replace("0.5", "50.0"))
    running = load_started(file)
    assert running.privacy.epsilon == 0.5
    assert running.digest == started.digest
    assert caplog.messages == [f"{file} changed; restart to apply"]
    with Guard(running).alone():
        Guard(running).store_release("a" * 64, torch.zeros(1), entry())
    (row,) = json.loads((running.folder / "ledger.json").read_text())["spent"]
    assert row["policy"] == started.digest
    # The copy that it was started with can be looked up later, and cannot be changed either.
    copy = tmp_path / "state" / "policies" / f"{row['policy']}.toml"
    assert "epsilon = 0.5" in copy.read_text()
    copy.write_text(copy.read_text().replace("0.5", "50.0"))
    with pytest.raises(ConfigError, match="was changed; restart the node"):
        load_started(file)


def write_images(path: Path, labels: list[int]) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (len(labels), 1, 8, 8), dtype=torch.uint8, generator=generator)
    save_file({"images": images, "labels": torch.tensor(labels)}, path)


def test_a_node_trains_on_all_it_has_and_a_server_tests_on_all_it_has(tmp_path: Path) -> None:
    from fedaux.config import Data
    from fedaux.data import load_own, load_test
    from fedaux.running.preflight import problems_of

    write_images(tmp_path / "own.safetensors", [0, 1, 1, 2])
    own = load_own(Data(source="tensors", path=str(tmp_path / "own.safetensors"), image_size=4))
    assert own.labels.tolist() == [0, 1, 1, 2]
    assert own.images.shape == (4, 1, 4, 4)
    assert len(own.test_labels) == 0
    folder = tmp_path / "test"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        from PIL import Image

        Image.new("L", (8, 8)).save(folder / name / "a.png")
    section = Data(source="folder", test=str(folder))
    held = load_test(section)
    assert held.classes == ("cat", "dog")
    assert held.test_labels.tolist() == [0, 1]
    assert len(held.images) == 0
    recipe = Experiment(data=section.model_dump(exclude_none=True, exclude_defaults=True))
    assert problems_of(recipe, federated=True) == []
    assert any(line.startswith("data.path: missing") for line in problems_of(recipe))
    nothing = Experiment(data={"source": "folder"})
    assert any(
        line.startswith("data.test: missing") for line in problems_of(nothing, federated=True)
    )
    silos = Experiment(
        data={"source": "folder", "clients": [str(folder)]}, split={"num_clients": 1}
    )
    assert any(line.startswith("data.clients: ") for line in problems_of(silos, federated=True))


def test_classes_are_the_servers_by_name_and_others_are_blank(tmp_path: Path) -> None:
    from fedaux.federation.work import own_examples

    write_images(tmp_path / "own.safetensors", [0, 2, 2, 1])
    text = (
        'client = 0\nclasses = ["2", "7", "0"]\n[data]\nsource = "tensors"\npath = '
        '"own.safetensors"\n'
    )
    config = node(tmp_path, text + "image_size = 8\nchannels = 1\n")
    assert own_examples(config, ("2", "7", "0")).labels.tolist() == [2, 0, 0, -1]


def test_keys_are_compared_as_their_files_have_them(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    from cryptography.hazmat.primitives import serialization

    from fedaux.federation.keys import write_node_key
    from fedaux.federation.registry import key_of, same_key

    public = write_node_key(tmp_path / "node.key", comment="ward 7").read_text()
    key = serialization.load_ssh_public_key(public.encode())
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert key_of(pem) == same_key(public)
    assert key_of(b"") == key_of(b"rubbish") == ""


def test_what_is_out_of_the_question_is_refused_before_any_work(tmp_path: Path) -> None:
    own = guard(tmp_path, "epsilon = 0.6")
    own.check_release(Certainty(mechanism="paper", epsilon=0.5, regularisation=0.1))
    for section, words in (
        (Certainty(mechanism="released-code", epsilon=0.5), "not allowed by this node"),
        (Certainty(mechanism="none", epsilon=0.5), "not allowed by this node"),
        (
            Certainty(mechanism="paper", epsilon=0.5, regularisation=1e-9),
            "certainty.regularisation = 1e-09",
        ),
        (
            Certainty(epsilon=1e-12, delta=1e-300),
            "certainty.epsilon = 1e-12: should be between 0.001 and 100",
        ),
        (
            Certainty(epsilon=0.5, delta=1e-300),
            "certainty.delta = 1e-300: should be between 1e-12 and 0.1",
        ),
        (
            Certainty(epsilon=0.5, components=10**6),
            "certainty.components = 1e+06: should be between 1 and 65536",
        ),
    ):
        with pytest.raises(Refusal, match=re.escape(words)):
            own.check_release(section)
    with pytest.raises(Refusal, match="does not fit this node's privacy budget"):
        own.check_price(Certainty(epsilon=0.7))
