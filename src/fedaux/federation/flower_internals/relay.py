"""A node's `flwr-clientapp`: passes the message to the node's warm process, which has everything
loaded.

It must start fast, so it is run by its path without site-packages and imports only the standard
library. Without a warm process it starts a new one.
"""

import json
import os
import socket
import sys

VARIABLE = "FEDAUX_WARM"
"""Environment variable with the socket of the warm process."""


def main() -> None:
    """Have one message answered, and exit with the status of the process that answers it."""
    arguments = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.environ[VARIABLE])
        socket.send_fds(connection, [json.dumps(arguments).encode()], [1, 2])
    except (KeyError, OSError):
        os.execv(
            sys.executable,
            [
                sys.executable,
                "-P",
                "-m",
                "fedaux.federation.flower_internals.clientapp",
                *arguments,
            ],
        )
    code = connection.recv(1)
    sys.exit(code[0] if code else 1)


if __name__ == "__main__":
    main()
