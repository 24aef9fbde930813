"""docs/deployment.md, followed to the letter on loopback: only host names and ports are others."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.harness import free_port, listens, wait_for
from helpers.paths import ROOT
from PIL import Image, ImageDraw

import fedaux

pytest.importorskip("flwr")
pytestmark = pytest.mark.federation

PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
HOSPITALS = range(3)
STEP = re.compile(
    r"^```(\w+)\n(.*?)^```$|^\| from \|[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", flags=re.S | re.M
)


def section(heading: str) -> str:
    """Return the text below a heading of the page."""
    (text,) = [part for part in re.split(r"^## ", PAGE, flags=re.M) if part.startswith(heading)]
    return text


@dataclass
class Reader:
    """Somebody who does what the page says, with a folder for each machine."""

    home: Path
    ports: dict[str, int] = field(default_factory=dict)
    running: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def machine(self, name: str) -> Path:
        folder = self.home / name
        folder.mkdir(exist_ok=True)
        return folder

    def port(self, written: str) -> int:
        """Return the port that stands for one of the page."""
        if written not in self.ports:
            self.ports[written] = free_port()
        return self.ports[written]

    def follow(self, text: str) -> str:
        """Do every step of a text in its order; return what the commands have said."""
        said = ""
        for language, block, table in STEP.findall(text):
            if table:
                self.send(table)
            elif language == "sh":
                said += self.type(block)
            elif name := re.match(r"# (\S+\.(?:py|toml))\n", block):
                (self.machine("server") / name[1]).write_text(
                    self.here(block, ""), encoding="utf-8"
                )
        return said

    def send(self, table: str) -> None:
        """Copy the files of a table from one machine to others."""
        for row in table.strip().splitlines():
            sender, file, receiver, name = (
                cell.strip().strip("`") for cell in row.strip("|").split("|")
            )
            for number in HOSPITALS:
                source, target = (
                    self.machine(f"hospital {number}" if "hospital" in place else "server")
                    for place in (sender, receiver)
                )
                shutil.copy(
                    source / file.replace("N", str(number)), target / name.replace("N", str(number))
                )

    def type(self, block: str) -> str:
        """Run a block where its first line says; one that is to be left running is left so."""
        first, _, commands = block.partition("\n")
        if "not part of the test" in first:
            return ""
        places = (
            ["server"]
            if "on the server" in first
            else [f"hospital {number}" for number in HOSPITALS]
        )
        assert "on the server" in first or "at each hospital" in first, first
        return "".join(
            self.leave_running(commands, place)
            if "leave it running" in first
            else self.run(commands, place)
            for place in places
        )

    def here(self, text: str, place: str) -> str:
        """Put this machine's names and ports in the place of the page's."""
        text = text.replace("server.example", "localhost")
        for written in ("8000", "8010", "8020"):
            text = re.sub(rf"\b{written}\b", str(self.port(written)), text)
        return re.sub(r"\b9094\b", str(self.port(f"9094 {place}")), text)

    def run(self, commands: str, place: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(commands, place)],
            cwd=self.machine(place),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=290,
        )
        assert done.returncode == 0, f"{place}: {commands}\n{done.stdout[-4000:]}\n{self.logs()}"
        return done.stdout

    def leave_running(self, command: str, place: str) -> str:
        with (self.home / f"{place}.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.here(command, place).strip()}"],
                cwd=self.machine(place),
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append((command.strip(), process))
        if " link " in command:
            (folder,) = re.findall(r"federate link (\S+)", command)
            config = (self.machine("server") / folder / "flower/config.toml").read_text()
            (port,) = re.findall(
                rf"superlink.{'simulation' if '--simulation' in command else folder}]\n.*:(\d+)",
                config,
            )
            wait_for(lambda: listens(int(port)), 60, "the server listens", self.logs)
        return ""

    def stop(self, word: str) -> str:
        """End what was started with this word in its command, by its id; return the command."""
        (entry,) = [entry for entry in self.running if f" {word} " in entry[0]]
        self.running.remove(entry)
        entry[1].send_signal(signal.SIGTERM)
        assert entry[1].wait(30) is not None
        return entry[0]

    def logs(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text()[-2500:]}" for log in sorted(self.home.glob("*.log"))
        )

    def close(self) -> None:
        for _, process in self.running:
            process.send_signal(signal.SIGTERM)
        for _, process in self.running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


def environment() -> dict[str, str]:
    """Return what a shell has in which the package is installed: nothing of Flower's is set."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FLWR_", "RAY_", "FEDAUX_NODE"))
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return inherited | {"PATH": path, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    one = Reader(tmp_path)
    try:
        yield one
    finally:
        one.close()


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def own_address() -> str:
    """Return an address of this machine that is not loopback: to the server it looks like another
    machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def status_of(reader: Reader, path: str, *, source: str) -> int:
    """Return how the server answers a request that comes from an address of this machine."""
    authority = reader.machine("server") / "hospitals/certificates/ca.crt"
    context = ssl.create_default_context(cafile=str(authority))
    connection = HTTPSConnection(
        "127.0.0.1", reader.port("8000"), context=context, source_address=(source, 0)
    )
    connection.request("POST", path)
    return connection.getresponse().status


def test_three_hospitals(reader: Reader) -> None:
    for number in range(1, 5):
        reader.follow(section(f"{number}. "))
    said = reader.follow(section("5. "))
    server = reader.machine("server")
    run = server / "hospitals/runs/hospitals"
    assert "finished" in said
    assert "3 present" in said
    assert (run / "report.html").exists()
    assert [row["clients_answered"] for row in rows_of(run)] == [[0, 1, 2]] * 5

    compared = reader.follow(section("6. "))
    assert compared.count(", same\n") == 5, compared
    assert "DIFFERENT" not in compared

    reader.follow(section("7. "))
    for number in HOSPITALS:
        held = fedaux.load(reader.machine(f"hospital {number}") / "model.safetensors")
        assert held.card["accuracy"]["last"] == rows_of(run)[-1]["accuracy"]
        assert held.card["privacy"]["epsilon"] is not None

    # No code of the server's was unpacked at a hospital, no key has travelled, and nothing was sent
    # to anybody else.
    for number in HOSPITALS:
        hospital = reader.machine(f"hospital {number}")
        assert not list(hospital.rglob("*fedaux_app*"))
        assert not list(hospital.rglob("*.fab"))
        assert len(json.loads(next(hospital.rglob("ledger.json")).read_text())["spent"]) == 1
    assert not list(server.rglob("node.key"))

    for path, open_to_all in {
        "control/register-node": False,
        "control/start-run": False,
        "fleet/pull-messages": True,
    }.items():
        local, other = (
            status_of(reader, f"/v1/{path}", source=source)
            for source in ("127.0.0.1", own_address())
        )
        assert local != 403
        assert (other != 403) is open_to_all, path

    # The server is stopped and started again: nodes come back by themselves, and nothing is done
    # twice.
    before = [
        next(reader.machine(f"hospital {n}").rglob("ledger.json")).read_text() for n in HOSPITALS
    ]
    command = reader.stop("link")
    reader.leave_running(command, "server")
    reader.follow(section("When things go wrong"))
    assert rows_of(run)[-1]["round"] == 5
    assert [
        next(reader.machine(f"hospital {n}").rglob("ledger.json")).read_text() for n in HOSPITALS
    ] == before


def test_own_data_and_noise_that_protects(reader: Reader) -> None:
    pytest.importorskip("opendp")
    reader.follow(section("With your own data"))
    server = reader.machine("server")
    for number, shapes in enumerate((["ellipse"], ["rectangle"], ["ellipse", "rectangle"])):
        images = reader.machine(f"hospital {number}") / "images"
        draw_folders(images, shapes, size=60, seed=number)
        file = server / f"clinics/nodes/node-{number}.toml"
        text = file.read_text().replace("/path/to/your/images", str(images))
        file.write_text(text.replace("classes = []", 'classes = ["ellipse", "rectangle"]'))
    draw_folders(server / "clinics/test_images", ["ellipse", "rectangle"], size=40, seed=10)
    draw_folders(server / "clinics/public_images", ["ellipse", "rectangle"], size=100, seed=11)

    # "The rest is as above."
    above = "\n".join(section(f"{number}. ") for number in range(1, 6)).replace(
        "hospitals", "clinics"
    )
    said = reader.follow(
        above.replace("8000", "8010").replace("fedaux federate init clinics", "true")
    )
    run = server / "clinics/runs/clinics"
    assert "Budget: ε = 0.1 at δ = 1e-05" in said
    assert "NOT PRIVATE" not in said
    assert [row["clients_answered"] for row in rows_of(run)] == [[0, 1, 2]] * 2
    model, tested = fedaux.load(run), server / "clinics/test_images"
    files = sorted(tested.glob("*/*"))
    labels = model(torch.stack([model.preprocess(file) for file in files])).argmax(dim=1)
    right = [
        file.parent.name == model.classes[label]
        for file, label in zip(files, labels.tolist(), strict=True)
    ]
    assert sum(right) / len(right) == rows_of(run)[-1]["accuracy"]
    entries = json.loads((run / "ledger.json").read_text())["entries"]
    assert [(entry["client"], entry["noise"], entry["epsilon"]) for entry in entries] == [
        (client, "secure", 0.1) for client in HOSPITALS
    ]


def draw_folders(folder: Path, shapes: list[str], *, size: int, seed: int) -> None:
    """Make images of shapes, a folder a shape."""
    lots = random.Random(seed)
    for shape in shapes:
        (folder / shape).mkdir(parents=True)
        for number in range(size):
            image = Image.new("L", (16, 16), lots.randrange(40))
            left, top, side = lots.randrange(1, 6), lots.randrange(1, 6), lots.randrange(6, 9)
            getattr(ImageDraw.Draw(image), shape)(
                (left, top, left + side, top + side), outline=255, fill=200
            )
            image.save(folder / shape / f"{number}.png")


def test_many_clients_in_flowers_simulation(reader: Reader) -> None:
    pytest.importorskip("ray")
    reader.follow(section("Many clients on one machine"))
    reader.run(
        "fedaux run many/app/recipe.toml --set rounds=1 --set engine.clients_at_once=1 --out "
        "simulated",
        "server",
    )
    (federated,), (simulated,) = (
        rows_of(reader.machine("server") / name) for name in ("many/runs/many", "simulated")
    )
    assert len(federated["clients_asked"]) == 40
    assert federated["clients_answered"] == simulated["clients_answered"]
    assert len(federated["clients_answered"]) > 20
    for key in ("accuracy", "loss", "local_loss"):
        assert federated[key] == simulated[key], key
