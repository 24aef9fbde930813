"""The server app: fedaux, with the recipe beside this package."""

from pathlib import Path

from fedaux.federation.server import server_app

app = server_app(Path(__file__).parent)
