"""`fedaux federate`: the commands for the server and the nodes of a federation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Run a real federation over Flower: folder, keys, server, nodes. See docs/deployment.md.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder = Annotated[
    Path, typer.Argument(help="The federation's folder, on the server.", metavar="DIR")
]
NodeFile = Annotated[Path, typer.Argument(help="The node's configuration.", metavar="NODE.toml")]
RootCertificates = Annotated[
    Path | None,
    typer.Option(
        "--root-certificates",
        help="The federation's ca.crt.",
        show_default="ca.crt beside the file",
    ),
]


@app.callback()
def private() -> None:
    """Let only the owner read the files that these commands and their processes write."""
    os.umask(0o077)


@app.command()
def init(
    folder: Folder,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", help="A TOML file, or the name of a recipe that ships with fedaux."
        ),
    ] = "demo",
    clients: Annotated[
        int | None,
        typer.Option(
            "--clients", help="Number of nodes.", show_default="the recipe's number of clients"
        ),
    ] = None,
    trial: Annotated[
        bool,
        typer.Option(
            "--trial",
            help="Give nodes parts of the recipe's data and seeded noise, without privacy: results "
            "equal the numbers of `fedaux run`.",
        ),
    ] = False,
    port: Annotated[
        int, typer.Option("--port", help="The server's port; simulations use this port plus 100.")
    ] = 8000,
    plain_updates: Annotated[
        bool | None,
        typer.Option(
            "--plain-updates/--no-plain-updates",
            help="Whether trained models may leave the nodes without differential privacy.",
            show_default="prompts, unless the recipe has [local.privacy] or this is a trial",
        ),
    ] = None,
) -> None:
    """Write a Flower app, its recipe, and a commented configuration for each node."""
    from fedaux.federation.folder import needs_plain_updates, ships, write_folder

    if trial and plain_updates is False:
        raise ValueError("--no-plain-updates: a trial sends plain updates; leave out one of them")
    if plain_updates is None and not trial and needs_plain_updates(recipe):
        plain_updates = _ask_for_plain_updates()
    files = write_folder(
        folder,
        recipe=recipe,
        clients=clients,
        trial=trial,
        port=port,
        plain_updates=bool(plain_updates),
    )
    for file in files:
        typer.echo(folder / file.relative_to(folder.resolve()))
    if ships(recipe):
        typer.echo("app/recipe.toml: fedaux, seed 0, all clients in every round; change it there.")
    if "classes = []" in files[-1].read_text(encoding="utf-8"):
        typer.echo("data.test cannot be read here: fill in `classes` in nodes/*.toml.")
    typer.echo(f"Next: fedaux federate certificates {folder} --host NAME, the server's host name.")


def _ask_for_plain_updates() -> bool:
    """Ask whether unprotected models may leave. Raises ValueError without a terminal."""
    if not sys.stdin.isatty():
        raise ValueError(
            "the recipe trains without DP-SGD, so trained models would leave the nodes "
            "unprotected: use --plain-updates to allow that, or --no-plain-updates and add "
            "[local.privacy] to the recipe"
        )
    return typer.confirm(
        "The recipe trains without DP-SGD: trained models leave each node unprotected, and a "
        "hostile server can extract private data from them. Certainty scores are private either "
        "way. Allow unprotected models?",
        default=False,
    )


@app.command()
def certificates(
    folder: Folder,
    hosts: Annotated[
        list[str],
        typer.Option(
            "--host", help="Host name or address of the server. May be repeated.", metavar="NAME"
        ),
    ],
    days: Annotated[
        int, typer.Option("--days", help="Validity of the server's certificate in days.")
    ] = 365,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Renew the server's certificate with the existing authority."),
    ] = False,
) -> None:
    """Create the federation's certificate authority and the server's certificate.

    Nodes need only ca.crt. The holder of ca.key can impersonate the server: it is needed only for
    --renew, so store it elsewhere.
    """
    from fedaux.federation.keys import write_certificates

    for file in write_certificates(folder / "certificates", hosts=hosts, days=days, renew=renew):
        typer.echo(file)


@app.command()
def key(
    path: Annotated[
        Path,
        typer.Argument(help="File of the private key; FILE.pub is the public key.", metavar="FILE"),
    ],
) -> None:
    """Create a node's key pair, on the node. The private key stays there; the server registers
    FILE.pub."""
    from fedaux.federation.keys import write_node_key

    public = write_node_key(path, comment=path.stem)
    typer.echo(
        f"{path}: private key, keep it on this machine\n{public}: public key, for the server"
    )


@app.command()
def register(
    folder: Folder,
    public_key: Annotated[
        Path, typer.Argument(help="The node's public key.", metavar="FILE.pub", exists=True)
    ],
    client: Annotated[int, typer.Option("--client", help="The client's number.", min=0)],
    replace: Annotated[
        bool, typer.Option("--replace", help="Give a client's number to a new key.")
    ] = False,
) -> None:
    """Register a node's public key for a client, while the server runs.

    No other key can then speak for this client, in any run.
    """
    from fedaux.federation.flower_internals import processes

    processes.require_flower()
    from fedaux.federation import registry

    folder = folder.resolve()
    text = public_key.read_text(encoding="utf-8")
    if registry.fingerprint(text) == "no key":
        raise ValueError(f"{public_key}: should be a public key, as `fedaux federate key` writes")
    processes.port_of(folder, simulation=False)  # raises for a folder of something else
    registry.register(folder / registry.REGISTRY, client=client, key=text, replace=replace)
    processes.register_key(folder, public_key)
    typer.echo(f"client {client}: {registry.fingerprint(text)}")


@app.command()
def link(
    folder: Folder,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "0.0.0.0",
    simulation: Annotated[
        bool, typer.Option("--simulation", help="Simulate all nodes on this machine, with Ray.")
    ] = False,
) -> None:
    """Run the server until it is stopped: Flower's SuperLink with TLS and node authentication.

    Other machines can only connect as nodes; runs are started and nodes registered on this machine.
    Runs are written to DIR/runs.
    """
    from fedaux.federation import keys
    from fedaux.federation.flower_internals import processes

    processes.require_flower()
    folder = folder.resolve()
    port = processes.port_of(folder, simulation=simulation)
    arguments = processes.link_arguments(
        folder, host="127.0.0.1" if simulation else host, port=port, simulation=simulation
    )
    os.environ.update(processes.environment(folder / "flower"))
    keys.make_private(folder)
    if simulation:
        os.environ["FEDAUX_NODE"] = str(folder / "nodes" / "simulation.toml")
    else:
        os.environ["FEDAUX_FOLDER"] = str(folder)
        processes.forget_deleted(processes.database_of(folder))
    os.chdir(folder)
    processes.serve_link(arguments)


@app.command()
def node(
    file: NodeFile,
    superlink: Annotated[str, typer.Option("--superlink", help="The server.", metavar="HOST:PORT")],
    certificate: RootCertificates = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", help="The node's private key.", show_default="node.key beside the file"
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", help="A local port for the node's own processes.")
    ] = 9094,
    json_logs: Annotated[
        bool, typer.Option("--json-logs", help="Log one JSON object per line.")
    ] = False,
) -> None:
    """Run a node until it is stopped: Flower's SuperNode with this installation of fedaux.

    The configuration is checked first and then fixed: changes apply after a restart. Code that the
    server sends is neither unpacked nor executed. If the node cannot go on by itself, it ends with
    a message and status 1.
    """
    from fedaux.federation.flower_internals import processes

    processes.require_flower()
    from fedaux.federation import sent
    from fedaux.federation.certificates import authority_problems
    from fedaux.federation.keys import make_private
    from fedaux.federation.node import load_node

    loaded = load_node(file)
    if loaded.privacy.noise == "secure":
        processes.require_secure_noise()
    command = processes.node_command(
        file,
        superlink=superlink,
        certificate=certificate or file.parent / "ca.crt",
        key=key or file.parent / "node.key",
        port=port,
    )
    problems = authority_problems(certificate or file.parent / "ca.crt")
    if problems := [*problems, *sent.problems(loaded.folder)]:
        raise ValueError("\n".join(problems))
    if Path(loaded.state).is_dir():
        make_private(Path(loaded.state))
    processes.become_node(command, file=file, config=loaded, json_logs=json_logs)


@app.command()
def check(
    file: Annotated[
        Path,
        typer.Argument(
            help="The node's configuration; or the federation's folder, on the server.",
            metavar="NODE.toml|DIR",
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="Also show what this recipe would request and what the node would refuse.",
        ),
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink",
            help="Also connect to this server, and check its certificate and the clocks.",
            metavar="HOST:PORT",
        ),
    ] = None,
    certificate: RootCertificates = None,
) -> None:
    """Check a node's configuration, read its data, and show what would leave this machine; without
    --superlink, offline. Of a server's folder, check the certificates.

    With --recipe the exit status is 1 if the node would refuse.
    """
    from fedaux.federation.check import check_connection, check_node, check_server

    console = Console()
    if file.is_dir():
        for line in check_server(file.resolve()):
            typer.echo(line)
        return
    connection = check_connection(file, superlink=superlink, certificate=certificate)
    shown, accepted = check_node(file, recipe=recipe)
    shown = [*shown, *connection]
    for part in shown:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    if not accepted:
        raise typer.Exit(1)


@app.command()
def ledger(
    file: NodeFile,
    noted: Annotated[
        str | None,
        typer.Option(
            "--noted",
            help="A hash that this command or the node's log showed earlier: it must be part of "
            "the record.",
            metavar="HASH",
        ),
    ] = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print the record as it is stored, in JSON lines.")
    ] = False,
) -> None:
    """Show what has left this node and what it cost, and verify that nothing was removed or
    changed.

    The exit status is 1 if the record or the ledger was cut, edited or rolled back.
    """
    from fedaux.federation.check import show_ledger

    if problems := show_ledger(file, Console(), noted=noted, json_lines=json_lines):
        for problem in problems:
            typer.echo(f"Error: {problem}", err=True)
        raise typer.Exit(1)


@app.command()
def watch(
    directory: Annotated[
        Path, typer.Argument(help="The run directory, on the server.", metavar="RUN_DIR")
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the nodes once and exit.")] = False,
) -> None:
    """Show which clients are present, busy or missing, and who was turned away, until the run ends.

    The exit status is 1 if the run has failed.
    """
    from fedaux.federation.watch import watch as show

    try:
        state = show(directory, Console(), once=once)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if state == "failed":
        raise typer.Exit(1)


@app.command()
def monitor(
    watched: Annotated[
        Path,
        typer.Argument(
            help="The federation's folder on the server, or a node's configuration.",
            metavar="DIR|NODE.toml",
        ),
    ],
    superlink: Annotated[
        str | None, typer.Option("--superlink", help="Node: the server.", metavar="HOST:PORT")
    ] = None,
    certificate: RootCertificates = None,
    node_port: Annotated[int, typer.Option("--node-port", help="Node: its local port.")] = 9094,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port of /health and /metrics.")] = 9464,
    once: Annotated[
        bool, typer.Option("--once", help="Print the health and exit, with status 1 if unhealthy.")
    ] = False,
) -> None:
    """Serve /health and /metrics (Prometheus) of a server or a node until it is stopped."""
    from fedaux.federation import monitor as monitoring

    if watched.is_dir():
        folder = watched.resolve()

        def look() -> monitoring.Report:
            return monitoring.server_report(folder)
    else:
        if superlink is None or not superlink.rpartition(":")[2].isdigit():
            raise ValueError(f"--superlink {superlink or ''}: should be HOST:PORT, for a node")
        place, authority = superlink, certificate or watched.parent / "ca.crt"

        def look() -> monitoring.Report:
            return monitoring.node_report(
                watched, superlink=place, certificate=authority, port=node_port
            )

    if once:
        found = look()
        typer.echo(monitoring.health(found), nl=False)
        raise typer.Exit(1 if found.problems else 0)
    monitoring.serve(look, host=host, port=port).serve_forever()
