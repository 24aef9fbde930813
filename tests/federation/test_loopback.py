"""The Flower engine in one process: parity with the simulator, faults, and what leaves a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import WHOLE, tiny

import fedaux
from fedaux.config import Experiment

pytest.importorskip("flwr", reason="needs the extra flower")
from flwr.proto.node_pb2 import NodeInfo
from helpers.loopback import LoopbackGrid, write_nodes

from fedaux.federation.registry import register
from fedaux.federation.server import ServerCallback, federate
from fedaux.federation.status import StatusCallback
from fedaux.federation.watch import read_status
from fedaux.privacy.filters import FILTERS
from fedaux.privacy.ledger import LedgerEntry
from fedaux.report.run import client_names

pytestmark = pytest.mark.usefixtures("without_pages")

DPSGD = {"plain_updates": False, "noise": "secure", "accountant": "renyi"}
TELLS = (
    "accuracy",
    "loss",
    "local_loss",
    "clients_answered",
    "clients_dropped",
    "bytes_up",
    "bytes_down",
)


def federated(**changes: Any) -> Experiment:
    base: dict[str, Any] = {
        "split": {"num_clients": 3, "alpha": 1.0},
        "federation": {"authenticated": False, "deadline": 5.0, "wait_seconds": 0.1},
        "engine": {"clients_at_once": 1},
    }
    from fedaux.recipes import merged

    return tiny(**merged(base, changes))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.quickly("fedaux", "fp16")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": ["fedavg@sgd-0.3", "feddf+p"]},
        {"mode": "linear", "method": ["fedaux", "feddf+p"]},
        {"federation": {"wire": "fp16"}},
        {"local": {"optimizer_state": "kept"}, "method": ["fedavg"]},
        {"participation_rate": 0.67, "method": ["fedaux+m"]},
        {"auxiliary": {"source": "noise", "size": 120}},
        {"method": ["scaffold@sgd-0.1", "feddyn+p"]},
    ],
    ids=["fedaux", "fedavg", "linear", "fp16", "kept", "part", "noise", "corrected"],
)
def test_a_federation_comes_to_the_simulators_figures(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    experiment = federated(rounds=2, **changes)
    fedaux.run(experiment, out=tmp_path / "simulated")
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment))
    federate(experiment, grid, path=tmp_path / "federated", resume=False)
    for simulated, real in zip(
        rows_of(tmp_path / "simulated"), rows_of(tmp_path / "federated"), strict=True
    ):
        assert {key: real[key] for key in TELLS} == {key: simulated[key] for key in TELLS}


def test_methods_without_training_come_to_the_simulators_figures_within_a_budget(
    tmp_path: Path,
) -> None:
    """Scores and head cost less together than their sum; nothing unprotected may leave here."""
    section = {"epsilon": 0.1, "head_epsilon": 0.5, "components": 4}
    allowed = {"mechanisms": ["mean", "heads", "classes"], "plain_updates": False, "epsilon": 0.53}
    methods = ["fedauxfdp", "private-student"]
    experiment = federated(rounds=1, method=methods, certainty=section)
    fedaux.run(experiment, out=tmp_path / "simulated")
    play(tmp_path, experiment, nodes={"privacy": allowed})
    for simulated, real in zip(
        rows_of(tmp_path / "simulated"), rows_of(tmp_path / "run"), strict=True
    ):
        assert {key: real[key] for key in TELLS} == {key: simulated[key] for key in TELLS}
    both = [(row["entry"]["mechanism"], row["entry"]["purpose"]) for row in spent(tmp_path, 0)]
    assert both == [
        ("mean", "certainty scores"),
        ("heads", "linear heads"),
        ("classes", "class sums"),
    ]


@pytest.mark.quickly("linear")
@pytest.mark.parametrize("mode", ["full", "linear"])
def test_label_counts_come_to_the_simulators_figures_and_do_not_depend_on_h0(
    tmp_path: Path, mode: str
) -> None:
    """Another h0 needs no other release, because counts do not depend on it."""
    allowed = {"mechanisms": ["counts"], "public_data": True, "epsilon": 0.11}
    experiment = federated(
        rounds=1, mode=mode, method="fedcounts", certainty={"epsilon": 0.1, "components": None}
    )
    fedaux.run(experiment, out=tmp_path / "simulated")
    play(tmp_path, experiment, nodes={"privacy": allowed})
    assert [{key: row[key] for key in TELLS} for row in rows_of(tmp_path / "run")] == [
        {key: row[key] for key in TELLS} for row in rows_of(tmp_path / "simulated")
    ]
    (first,) = spent(tmp_path, 0)
    assert (first["entry"]["mechanism"], first["entry"]["purpose"]) == ("counts", "class counts")
    another = experiment.model_copy(
        update={"pretraining": experiment.pretraining.model_copy(update={"temperature": 0.3})}
    )
    files = write_nodes(tmp_path / "nodes", experiment, privacy=allowed)
    federate(another, LoopbackGrid(files), path=tmp_path / "again", resume=False)
    assert spent(tmp_path, 0) == [first]


@pytest.mark.parametrize("terms", [{"mechanisms": ["mean"]}, {"epsilon": 0.51}])
def test_a_node_refuses_heads_before_it_spends_anything(
    tmp_path: Path, terms: dict[str, Any]
) -> None:
    experiment = federated(method="fedauxfdp", certainty={"epsilon": 0.1, "head_epsilon": 0.5})
    allowed = {"mechanisms": ["mean", "heads"], "plain_updates": False, "epsilon": 1.0} | terms
    with pytest.raises(ValueError, match="no client released a head; client 0: refused: "):
        play(tmp_path, experiment, nodes={"privacy": allowed})
    assert spent(tmp_path, 0) == []


def play(
    tmp_path: Path, experiment: Experiment, *, nodes: dict[str, Any] | None = None
) -> LoopbackGrid:
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment, **(nodes or {})))
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    return grid


def spent(tmp_path: Path, client: int) -> list[dict[str, Any]]:
    file = tmp_path / "nodes" / "state" / f"client-{client:05d}" / "ledger.json"
    return list(json.loads(file.read_text())["spent"]) if file.exists() else []


def test_secure_noise_is_the_default_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    experiment = federated(rounds=1)
    play(tmp_path, experiment, nodes={"privacy": {"noise": "secure"}})
    assert {row["entry"]["noise"] for client in range(3) for row in spent(tmp_path, client)} == {
        "secure"
    }
    entries = json.loads((tmp_path / "run" / "ledger.json").read_text())["entries"]
    assert [entry["noise"] for entry in entries] == ["secure"] * 3
    # Other noise, other figures: nobody could have computed it.
    fedaux.run(experiment, out=tmp_path / "simulated")
    assert rows_of(tmp_path / "run")[0]["loss"] != rows_of(tmp_path / "simulated")[0]["loss"]


@pytest.mark.slow
def test_methods_of_one_seed_share_a_release_and_another_seed_costs_another(tmp_path: Path) -> None:
    experiment = federated(
        rounds=1, method=["fedaux", "fedaux+logits"], seeds=[0, 1], certainty={"epsilon": 0.4}
    )
    play(tmp_path, experiment, nodes={"privacy": {"epsilon": 1.0}})
    assert [len(spent(tmp_path, client)) for client in range(3)] == [2, 2, 2]


def test_a_run_beyond_the_budget_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    """The first of two seeds would fit; the node knows of the second from the beginning."""
    experiment = federated(rounds=1, method=["fedaux"], seeds=[0, 1])
    with pytest.raises(ValueError, match=r"every client refuses; client 0: ") as failure:
        play(tmp_path, experiment, nodes={"privacy": {"epsilon": 1.2}})
    assert "refused: this request does not fit this node's privacy budget" in str(failure.value)
    assert rows_of(tmp_path / "run") == []
    assert [spent(tmp_path, client) for client in range(3)] == [[], [], []]


def test_a_node_that_would_refuse_the_training_does_not_pay_for_scores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="updates without DP-SGD do not leave this node"):
        play(tmp_path, federated(rounds=1), nodes={"privacy": {"plain_updates": False}})
    assert [spent(tmp_path, client) for client in range(3)] == [[], [], []]
    refusals = [record for record in caplog.records if record.name == "fedaux.node"]
    assert refusals
    assert not any(record.exc_info for record in refusals), "a refusal is no error of the node"


def test_the_same_run_again_repeats_its_releases_and_is_not_refused(tmp_path: Path) -> None:
    experiment = federated(rounds=1, seeds=[0, 1], split={"num_clients": 1})
    files = write_nodes(tmp_path / "nodes", experiment, privacy={"epsilon": 2.0})
    for out in ("first", "second"):
        federate(experiment, LoopbackGrid(files), path=tmp_path / out, resume=False)
        assert [row["clients_answered"] for row in rows_of(tmp_path / out)] == [[0], [0]]
    assert len(spent(tmp_path, 0)) == 2


@pytest.mark.parametrize(
    ("changes", "nodes", "words"),
    [
        (
            {"certainty": {"epsilon": 3.0}},
            {"epsilon": 2.0},
            "does not fit this node's privacy budget",
        ),
        (
            {"certainty": {"mechanism": "none"}},
            {},
            "certainty.mechanism = none: not allowed by this node",
        ),
        (
            {"certainty": {"mechanism": "released-code"}},
            {},
            "certainty.mechanism = released-code: not allowed by this node",
        ),
        ({"certainty": {"mechanism": "paper"}}, {"mechanisms": ["mean"]}, "not allowed"),
    ],
)
def test_a_node_keeps_to_its_own_terms(
    tmp_path: Path, changes: dict[str, Any], nodes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match="every client refuses") as failure:
        play(tmp_path, federated(rounds=1, **changes), nodes={"privacy": nodes})
    assert str(failure.value).count(words) == 3
    assert not spent(tmp_path, 0)


def test_what_protects_nothing_leaves_only_where_the_node_says_so(tmp_path: Path) -> None:
    experiment = federated(rounds=1, certainty={"mechanism": "none"})
    play(tmp_path, experiment, nodes={"privacy": {"mechanisms": ["none"], "epsilon": 0.1}})
    assert rows_of(tmp_path / "run")[0]["clients_answered"] == [0, 1, 2]
    assert spent(tmp_path, 0)[0]["entry"]["epsilon"] == "inf"


@pytest.mark.slow
def test_plain_updates_stay_where_the_node_wants_them_private(tmp_path: Path) -> None:
    experiment = federated(rounds=9, method=["fedavg"])
    reason = "client 0: refused: .*updates without DP-SGD do not leave this node"
    with pytest.raises(ValueError, match=f"every client refuses; {reason}"):
        play(tmp_path, experiment, nodes={"privacy": {"plain_updates": False}})
    status = read_status(tmp_path / "run")
    assert status["run"]["state"] == "failed"
    assert "every client refuses" in status["run"]["reason"]
    assert rows_of(tmp_path / "run") == [], "a round in which all refuse is not stored"
    # With another policy the same run goes on.
    files = write_nodes(tmp_path / "nodes", experiment)
    federate(experiment, LoopbackGrid(files), path=tmp_path / "run", resume=True)
    assert len(rows_of(tmp_path / "run")) == 9
    assert read_status(tmp_path / "run")["run"]["state"] == "finished"


def test_a_run_without_any_usable_answer_has_failed(tmp_path: Path) -> None:
    experiment = federated(rounds=1, method=["fedavg"])
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment))
    grid.change = dict.fromkeys(grid.files, rubbish("nan"))
    with pytest.raises(ValueError, match="fedavg, seed 0: no client gave a usable answer; client"):
        federate(experiment, grid, path=tmp_path / "run", resume=False)
    status = read_status(tmp_path / "run")
    assert status["run"]["state"] == "failed"
    assert [row["rejected"] for row in status["clients"].values()] == [1, 1, 1]
    assert "holds NaN or infinity" in status["clients"]["2"]["reason"]


@pytest.mark.slow
def test_private_updates_are_counted_and_refused_at_once_beyond_the_budget(
    tmp_path: Path,
) -> None:
    pytest.importorskip("opacus")
    experiment = federated(
        rounds=2,
        method=["fedavg"],
        data=WHOLE,
        split={"num_clients": 2},
        local={"privacy": {"noise_multiplier": 3.0}},
    )
    play(tmp_path / "large", experiment, nodes={"privacy": DPSGD | {"epsilon": 9.0}})
    rows = rows_of(tmp_path / "large" / "run")
    assert [row["clients_answered"] for row in rows] == [[0, 1], [0, 1]]
    assert len(spent(tmp_path / "large", 0)) == 2
    assert {row["entry"]["noise"] for row in spent(tmp_path / "large", 0)} == {"secure"}
    assert rows[0]["local_loss"] is None
    # One round would fit, two do not.
    entries = [LedgerEntry.from_json(row["entry"]) for row in spent(tmp_path / "large", 0)]
    one, two = (FILTERS["renyi"](epsilon=0.8, delta=1e-5)(entries[:count])[0] for count in (1, 2))
    assert one < 0.8 < two
    with pytest.raises(ValueError, match="every client refuses"):
        play(tmp_path / "small", experiment, nodes={"privacy": DPSGD | {"epsilon": 0.8}})
    assert not spent(tmp_path / "small", 0)


class Stop(BaseException):  # like a signal: nothing is meant to catch it
    pass


def test_a_private_update_asked_for_again_is_the_stored_one(tmp_path: Path) -> None:
    """A server that stops before it has written a round down asks again, and nothing is spent for
    it."""
    pytest.importorskip("opacus")
    experiment = federated(
        rounds=2,
        method=["fedavg"],
        split={"num_clients": 2},
        local={"privacy": {"noise_multiplier": 3.0}},
    )
    files = write_nodes(
        tmp_path / "nodes", experiment, privacy={"epsilon": 50.0, "noise": "secure"}
    )
    grid = LoopbackGrid(files)
    sent: list[bytes] = []

    def stop(reply: Any) -> Any:
        if "weights" in reply.content:
            sent.append(
                b"".join(array.data for _, array in sorted(reply.content["weights"].items()))
            )
            raise Stop
        return reply

    grid.change = {1001: stop}
    with pytest.raises(Stop):
        federate(experiment, grid, path=tmp_path / "run", resume=False)
    assert [len(spent(tmp_path, client)) for client in range(2)] == [1, 1]
    grid = LoopbackGrid(files)
    again: list[bytes] = []

    def listen(reply: Any) -> Any:
        if "weights" in reply.content:
            again.append(
                b"".join(array.data for _, array in sorted(reply.content["weights"].items()))
            )
        return reply

    grid.change = {1001: listen}
    federate(experiment, grid, path=tmp_path / "run", resume=True)
    assert [len(spent(tmp_path, client)) for client in range(2)] == [2, 2]
    assert again[0] == sent[0]
    entries = json.loads((tmp_path / "run" / "ledger.json").read_text())["entries"]
    assert len(entries) == 4


def test_a_server_that_stops_in_the_preparation_gets_the_same_release(tmp_path: Path) -> None:
    experiment = federated(rounds=2)
    fedaux.run(experiment, out=tmp_path / "simulated")
    files = write_nodes(tmp_path / "nodes", experiment)
    grid = LoopbackGrid(files)

    def stop(reply: Any) -> Any:
        if "release" in reply.content:
            raise Stop
        return reply

    grid.change = {1002: stop}
    with pytest.raises(Stop):
        federate(experiment, grid, path=tmp_path / "run", resume=False)
    federate(experiment, LoopbackGrid(files), path=tmp_path / "run", resume=True)
    assert [len(spent(tmp_path, client)) for client in range(3)] == [1, 1, 1]
    for simulated, real in zip(
        rows_of(tmp_path / "simulated"), rows_of(tmp_path / "run"), strict=True
    ):
        assert {key: real[key] for key in TELLS} == {key: simulated[key] for key in TELLS}


def test_who_does_not_answer_is_named_and_not_waited_for_again(tmp_path: Path) -> None:
    experiment = federated(rounds=3, method=["fedavg"], federation={"deadline": 1.0})
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment))
    grid.silent = {1002}
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    rows = rows_of(tmp_path / "run")
    assert rows[0]["clients_dropped"] == {"2": "no answer within 1 s"}
    assert rows[0]["clients_answered"] == [0, 1]
    assert 2 in rows[1]["clients_absent"] or rows[1]["clients_dropped"]


def test_no_client_at_all_stops_the_run_with_words(tmp_path: Path) -> None:
    experiment = federated(federation={"wait_seconds": 0.5})
    with pytest.raises(
        ValueError, match=r"no client is present after 0.5 s \(federation.wait_seconds\)"
    ):
        federate(experiment, LoopbackGrid({}), path=tmp_path / "run", resume=False)


def test_nobody_takes_the_client_of_another(tmp_path: Path) -> None:
    experiment = federated(
        rounds=1, method=["fedavg"], federation={"authenticated": True, "wait_for": 3}
    )
    files = write_nodes(tmp_path / "nodes", experiment)
    grid = LoopbackGrid(
        files | {2000: files[1000]}
    )  # a node that says it is client 0, which is there
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    nodes = json.loads((tmp_path / "run" / "federation.json").read_text())["nodes"]
    assert nodes["0"] == "node 1000"
    # And not when client 0 is away, either.
    grid = LoopbackGrid({1001: files[1001], 1002: files[1002], 2000: files[1000]})
    more = federated(rounds=2, method=["fedavg"], federation={"authenticated": True, "wait_for": 3})
    (tmp_path / "run" / "config.toml").write_text(
        (tmp_path / "run" / "config.toml").read_text().replace("rounds = 1", "rounds = 2")
    )
    federate(more, grid, path=tmp_path / "run", resume=True)
    assert rows_of(tmp_path / "run")[-1]["clients_absent"] == [0]
    assert (2000, "train") not in grid.asked


def rubbish(change: str) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    def changed(reply: Any) -> Any:
        if "weights" not in reply.content:
            return reply
        old = reply.content["weights"]["tensors"]
        said = json.loads(reply.content["answer"]["text"])
        length = int.from_bytes(old.data[:8], "little")
        header, body, stype = (
            json.loads(old.data[8 : 8 + length]),
            old.data[8 + length :],
            old.stype,
        )
        name = next(name for name, entry in header.items() if entry["dtype"] == "F32")
        begin, end = header[name]["data_offsets"]
        if change == "nan":
            body = body[:begin] + b"\xff" * (end - begin) + body[end:]
        elif change == "shape":
            header[name]["shape"] = [10**12]
        elif change == "swapped":
            header[name]["shape"] = [1, *header[name]["shape"]]
        elif change == "bytes":
            header[name]["data_offsets"] = [begin, end - 4]
        elif change == "beyond":
            body = body[:-4]
        elif change == "below":
            header[name]["data_offsets"] = [-4, end - begin - 4]
        elif change == "type":
            header[name]["dtype"] = "object"
        elif change == "pickle":
            stype = "numpy.ndarray"
        elif change == "header":
            header = [header]
        elif change == "missing":
            del header[name]
        elif change == "more":
            header["evil<script>"] = header[name]
        elif change == "two lines":
            header["evil\n<script>"] = header[name]
        elif change == "other":
            said["client"] = 0
        elif change == "examples":
            said["num_examples"] = 10**30
        elif change == "loss":
            said["loss"] = float("nan")
        text = "{" if change == "json" else json.dumps(said)
        packed = json.dumps(header).encode()
        claimed = 2**62 if change == "long" else len(packed)
        data = claimed.to_bytes(8, "little") + packed + body
        weights = ArrayRecord({"tensors": Array("uint8", (len(data),), stype, data)})
        content = RecordDict({"weights": weights, "answer": ConfigRecord({"text": text})})
        if change == "nothing":
            content = RecordDict()
        reply.content = content
        return reply

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("nan", "holds NaN or infinity"),
        ("shape", "bytes, which is not float32 [1000000000000]"),
        ("swapped", "is float32 [1, "),
        ("bytes", "bytes, which is not float32"),
        ("beyond", "bytes, which is not"),
        ("below", "is not valid"),
        ("type", "of type object is not valid"),
        ("pickle", "has no tensors"),
        ("header", "header of the tensors cannot be read"),
        ("long", "header of the tensors cannot be read"),
        ("missing", "is missing"),
        ("more", "tensor evil<script> is unknown"),
        ("two lines", "tensor evil?<script> of type F32 is not valid"),
        ("other", "answers as client 0"),
        ("examples", "number of examples is not valid"),
        ("loss", "training came to a loss of nan"),
        ("json", "the answer cannot be read"),
        ("nothing", "the answer cannot be read"),
    ],
)
def test_rubbish_is_refused_in_words(tmp_path: Path, change: str, words: str) -> None:
    experiment = federated(rounds=1, method=["fedavg"], split={"num_clients": 2})
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment))
    grid.change = {1001: rubbish(change)}
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    (row,) = rows_of(tmp_path / "run")
    assert row["clients_answered"] == [0]
    assert words in row["clients_dropped"]["1"]


def test_an_error_at_a_node_says_nothing_of_its_disk(tmp_path: Path) -> None:
    experiment = federated(rounds=1, method=["fedavg"], split={"num_clients": 2})
    secret = tmp_path / "patients-of-ward-7"
    secret.mkdir()
    files = write_nodes(tmp_path / "nodes", experiment)
    text = (
        files[1001]
        .read_text()
        .replace(
            'source = "digits"',
            f'source = "folder"\npath = "{secret}"\nimage_size = 8\nchannels = 1',
        )
    )
    files[1001].write_text(text)
    federate(experiment, LoopbackGrid(files), path=tmp_path / "run", resume=False)
    (row,) = rows_of(tmp_path / "run")
    assert row["clients_dropped"] == {"1": "the node failed; see its log"}


class Keyed(LoopbackGrid):
    """Nodes with public keys."""

    keys: dict[int, bytes]

    def get_nodes(self) -> Any:
        return [NodeInfo(node_id=node, public_key=pem) for node, pem in self.keys.items()]


def test_a_registered_node_cannot_take_the_number_of_another(tmp_path: Path) -> None:
    """Not even in a new run directory, where nobody has claimed a number before."""
    keys = [key_pair() for _ in range(3)]
    experiment = federated(
        rounds=1, method=["fedavg"], federation={"authenticated": True, "wait_seconds": 0.1}
    )
    files = write_nodes(tmp_path / "nodes", experiment)
    registry = tmp_path / "members.json"
    for client in (0, 1):
        register(registry, client=client, key=keys[client][0])
    grid = Keyed({1001: files[1001], 2000: files[1000], 1002: files[1002]})
    # The second hospital also starts a node that claims to be client 0; client 2 is not registered.
    grid.keys = {2000: keys[1][1], 1001: keys[1][1], 1002: keys[2][1]}
    federate(experiment, grid, path=tmp_path / "run", resume=False, registry=registry)
    (row,) = rows_of(tmp_path / "run")
    assert row["clients_answered"] == [1]
    assert row["clients_absent"] == [0, 2]
    thief, stranger = read_status(tmp_path / "run")["turned_away"]
    assert thief["node"] == "2000"
    assert thief["reason"] == "claims to be client 0, which is registered with another key"
    assert thief["key"].startswith("SHA256:")
    assert "client 2, for which no key is registered: fedaux federate reg" in stranger["reason"]
    with pytest.raises(ValueError, match="--client 2: this key is registered for client 1"):
        register(registry, client=2, key=keys[1][0])
    with pytest.raises(ValueError, match=r"registered with another key, SHA256:.*--replace"):
        register(registry, client=0, key=keys[2][0])
    register(registry, client=0, key=keys[2][0], replace=True)


def test_a_recipe_may_say_whose_key_is_whose(tmp_path: Path) -> None:
    keys = [key_pair(), key_pair()]
    experiment = federated(
        rounds=1,
        method=["fedavg"],
        split={"num_clients": 2},
        federation={"nodes": [text for text, _ in keys], "wait_seconds": 0.1},
    )
    files = write_nodes(tmp_path / "nodes", experiment)

    grid = Keyed(files)
    grid.keys = {
        1000: keys[0][1],
        1001: key_pair()[1],
    }  # the second node has the right number and another key
    federate(experiment, grid, path=tmp_path / "run", resume=False)
    (row,) = rows_of(tmp_path / "run")
    assert row["clients_answered"] == [0]
    assert row["clients_absent"] == [1]


def key_pair() -> tuple[str, bytes]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    line = key.public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    ).decode()
    return f"{line} somebody", key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_the_log_and_the_report_call_nodes_by_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ServerCallback(4)
    callback.status = StatusCallback(tmp_path, num_clients=4, rounds=1)
    callback.status.seen(0, name="north\x1b[2J")
    callback.status.seen(2, name="south")
    row = {"method": "fedaux", "seed": 0, "round": 1, "accuracy": 0.5}
    clients = {"clients_asked": [0, 1], "clients_answered": [], "clients_absent": [2, 3]}
    dropped = {"clients_dropped": {"0": "no answer", "1": "refused"}}
    with caplog.at_level("INFO", logger="fedaux"):
        callback.round(row | clients | dropped)
    assert caplog.messages == [
        "fedaux, round 1: 0 of 2 clients answered, accuracy 50.0 %; north?[2J: no answer; client "
        "1: refused; absent: south, 3"
    ]
    assert client_names(tmp_path)[1:] == ("client 1", "south", "client 3")
