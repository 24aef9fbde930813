"""A node's `flwr-clientapp`: hand the message to the node's warm process, which has everything loaded.

Run by its path and without site-packages, for it must start in no time; it imports the standard library alone. Without
a warm process it becomes a cold one.
"""

import json
import os
import socket
import sys

VARIABLE = "FEDAUX_WARM"
"""Names the socket of the warm process."""


def main() -> None:
    """Let one message be answered, and end as the process that answers it ends."""
    arguments = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.environ[VARIABLE])
        socket.send_fds(connection, [json.dumps(arguments).encode()], [1, 2])
    except (KeyError, OSError):
        os.execv(
            sys.executable, [sys.executable, "-P", "-m", "fedaux.federation.clientapp", *arguments]
        )
    code = connection.recv(1)
    sys.exit(code[0] if code else 1)


if __name__ == "__main__":
    main()
