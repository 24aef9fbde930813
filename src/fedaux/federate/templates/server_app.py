"""The server's side: fedaux, with the recipe beside this package."""

from pathlib import Path

from fedaux.engines.flower.server import server_app

app = server_app(Path(__file__).parent)
