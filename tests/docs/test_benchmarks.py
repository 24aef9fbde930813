from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import ROOT
from torch import nn

from fedaux.core.compute import has_bf16

FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))

import limits  # noqa: E402
import peers  # noqa: E402
import players  # noqa: E402
import round as one_round  # noqa: E402
import scale  # noqa: E402
import showing  # noqa: E402

TINY = (
    "--device cpu --clients 4 --participants 3 --examples 40 --distill 160 --test 20 --rounds 2 "
    "--warmup 1 --alpha 1"
)


def run(script: str, *words: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / script), *words, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.slow
def test_round_ends_with_the_weights_of_the_plain_loop_and_tells_all_it_measured(
    tmp_path: Path,
) -> None:
    result = run(
        "round.py",
        *TINY.split(),
        "--plot",
        str(tmp_path / "round.svg"),
        out=tmp_path / "round.json",
    )
    # Another order of sums changes the last bits, which Adam's division enlarges; a single step of
    # it is 3e-3.
    assert result["max_difference"] < 1e-3
    assert result["relative_difference"] < 1e-2
    precisions = {"fp32", "bf16"} if has_bf16(torch.device("cpu")) else {"fp32"}
    assert set(result["seconds"]) == {f"plain_{precision}" for precision in precisions} | {"fast"}
    phases = {"train", "average", "teach", "distill", "evaluate", "all"}
    for name, seconds in result["seconds"].items():
        assert phases <= set(seconds)
        assert seconds["all"] >= 0.9 * seconds["train"] > 0
        assert set(result["images_per_second"][name]) == {"train", "teach", "distill", "evaluate"}
        assert result["fraction_of_limit"][name]["all"] > 0
    assert (
        result["ratio"] == result["seconds"]["plain_fp32"]["all"] / result["seconds"]["fast"]["all"]
    )
    if "bf16" in precisions:
        assert (
            result["ratio_bf16"]
            == result["seconds"]["plain_bf16"]["all"] / result["seconds"]["fast"]["all"]
        )
    else:
        assert result["ratio_bf16"] is None
    assert result["peak_tflops"].keys() == precisions
    assert result["scoring_seconds"] > 0
    assert result["preparation_seconds"] > 0
    assert result["settings"]["participants"] == 3
    assert result["machine"]["device"] == "cpu"
    assert (tmp_path / "round.svg").read_text().startswith("<?xml")


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_is_cut_off_leaves_the_rounds_it_had_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = players.fast_player

    def interrupted(fast: Any) -> Any:
        play = real(fast)

        def until_the_third(number: int) -> Any:
            if number == 3:
                raise KeyboardInterrupt
            return play(number)

        return until_the_third

    monkeypatch.setattr(one_round, "fast_player", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one_round.main([*TINY.split(), "--no-check", "--json", str(tmp_path / "round.json")])
    result = json.loads((tmp_path / "round.json").read_text())
    assert result["settings"]["rounds"] == 1
    assert result["ratio"] > 0


@pytest.mark.slow
def test_scale_measures_every_point(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--quick", "--sweep", "participants", "--rounds", "1"]
    scale.main([*words, "--json", str(tmp_path / "scale.json")])
    result = json.loads((tmp_path / "scale.json").read_text())
    points = result["sweeps"]["participants"]["points"]
    assert [point["size"] for point in points] == [1, 4, 16]
    assert all(point["seconds"] > 0 and point["bytes"] > 0 for point in points)


def test_operations_are_those_of_a_matrix_product() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False))
    images = torch.randint(256, (7, 3, 2, 2), dtype=torch.uint8)
    found = limits.operations_of_image(model, images)
    assert found["teach"] == 2 * 12 * 5
    assert (
        found["train"] == 4 * 12 * 5
    )  # forward, and the gradient of the weights; images need none


def test_peak_memory_is_what_is_held_at_a_time() -> None:
    def work() -> None:
        for _ in range(3):
            torch.ones(250_000)  # a million bytes, given back at once
        both = [torch.ones(500_000) for _ in range(2)]
        del both

    assert limits.peak_memory(work, device=torch.device("cpu")) == pytest.approx(4e6, rel=0.01)


def test_deviation_and_line() -> None:
    assert scale.deviation([1.0, 1.0, 0.8, 1.1]) == pytest.approx(0.2)
    intercept, slope = scale.line_through(
        [{"size": size, "seconds": 0.5 + 0.25 * size} for size in (1, 2, 8)]
    )
    assert intercept == pytest.approx(0.5)
    assert slope == pytest.approx(0.25)


def test_missing_peer_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = peers.Peer(
        "Nobody's simulator", "nobody", ("no_such_module",), "pip install nobody", lambda task: []
    )
    monkeypatch.setitem(peers.PEERS, "nobody", absent)
    with pytest.raises(
        SystemExit,
        match=r"--peer nobody: Nobody's simulator is not installed here: pip install nobody",
    ):
        peers.refuse_missing(["nobody"])


def test_a_figure_that_cannot_be_drawn_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit, match=r"--plot round.txt: should end in .png, .svg, .pdf"):
        showing.check_plot(Path("round.txt"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        showing.check_plot(Path("round.png"))
