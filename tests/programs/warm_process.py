"""A warm process answers like a new one, and its forks end with whoever asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from fedaux.federation.flower_internals import processes, warm

folder = processes.write_commands(Path("commands"))
cold = subprocess.run([folder / "flwr-clientapp", "--help"], capture_output=True, text=True)
assert cold.returncode == 0, cold
assert "Run a Flower ClientApp" in cold.stdout, cold
own = os.environ | warm.start(Path(sys.argv[1]))
print(own["FEDAUX_WARM"])
said = []
for arguments in (["--help"], ["--no-such-option"], ["--help"]):
    began = time.monotonic()
    done = subprocess.run(
        [folder / "flwr-clientapp", *arguments], env=own, capture_output=True, text=True
    )
    print(done.returncode, round(time.monotonic() - began, 3))
    said.append(done.stdout + done.stderr)
assert said[0] == said[2] == cold.stdout
assert "flwr-clientapp: error: " in said[1], said[1]
arguments = ["--insecure", "--token", "x", "--runtime-api-address", "192.0.2.1:9"]
hanging = subprocess.Popen(
    [folder / "flwr-clientapp", *arguments], env=own, stderr=subprocess.DEVNULL
)


def forks() -> list[str]:
    warm_processes = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [
        f for p in warm_processes for f in Path(f"/proc/{p}/task/{p}/children").read_text().split()
    ]


while not forks():
    time.sleep(0.05)
hanging.kill()
hanging.wait()
ends = time.monotonic() + 20
while forks():
    assert time.monotonic() < ends, "the fork outlives the process that asked"
    time.sleep(0.05)
