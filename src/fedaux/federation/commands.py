"""`fedaux federate`: what the people at the server and at the nodes of a federation type."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="A real federation over Flower: its folder, keys, server, nodes, and a view of them. docs/deployment.md leads "
    "through it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder = Annotated[
    Path, typer.Argument(help="The folder of the federation, at the server.", metavar="DIR")
]
NodeFile = Annotated[Path, typer.Argument(help="The node's configuration.", metavar="NODE.toml")]


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
            "--clients",
            help="How many nodes there are.",
            show_default="the recipe's number of clients",
        ),
    ] = None,
    trial: Annotated[
        bool,
        typer.Option(
            "--trial",
            help="Give each node its part of the recipe's own data, and seeded noise: the figures are then those of "
            "`fedaux run`. Nobody is protected.",
        ),
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            help="The port on which the server will listen; that of simulations is 100 further.",
        ),
    ] = 8000,
    plain_updates: Annotated[
        bool | None,
        typer.Option(
            "--plain-updates/--no-plain-updates",
            help="Whether trained models may leave the nodes without differential privacy.",
            show_default="asks, unless the recipe has [local.privacy] or this is a trial",
        ),
    ] = None,
) -> None:
    """Write a ready Flower app, its recipe, and a configuration for every node, all with comments."""
    from fedaux.federation.folder import needs_plain_updates, write_folder

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
    typer.echo(
        f"Next: fedaux federate certificates {folder} --host NAME, the server's name as nodes know it."
    )


def _ask_for_plain_updates() -> bool:
    """Ask whether unprotected models may leave; without a terminal, say which option answers."""
    if not sys.stdin.isatty():
        raise ValueError(
            "the recipe trains without DP-SGD, so trained models would leave the nodes unprotected: "
            "say --plain-updates to allow that, or --no-plain-updates and give the recipe a [local.privacy]"
        )
    return typer.confirm(
        "The recipe trains without DP-SGD: trained models leave each node unprotected, and a hostile server can read "
        "private data out of them. Certainty scores are private either way. Allow unprotected models?",
        default=False,
    )


@app.command()
def certificates(
    folder: Folder,
    hosts: Annotated[
        list[str],
        typer.Option(
            "--host",
            help="Name or address of the server as nodes know it. May be repeated.",
            metavar="NAME",
        ),
    ],
    days: Annotated[
        int, typer.Option("--days", help="How long the server's certificate is valid.")
    ] = 365,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew", help="A new certificate for the server, from the authority that is there."
        ),
    ] = False,
) -> None:
    """Make the federation's own authority and the server's certificate.

    Nodes are given ca.crt, and nothing else of this. Whoever has ca.key can pose as the server: once server.pem is
    there, it is needed for --renew only and is best kept elsewhere.
    """
    from fedaux.federation.keys import write_certificates

    for file in write_certificates(folder / "certificates", hosts=hosts, days=days, renew=renew):
        typer.echo(file)


@app.command()
def key(
    path: Annotated[
        Path,
        typer.Argument(
            help="Where the private key goes; the public one beside it.", metavar="FILE"
        ),
    ],
) -> None:
    """Make a node's key pair, on the node. The private key stays there; the server registers FILE.pub."""
    from fedaux.federation.keys import write_node_key

    public = write_node_key(path, comment=path.stem)
    typer.echo(f"{path}: private, stays here\n{public}: for the server")


@app.command()
def link(
    folder: Folder,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "0.0.0.0",
    simulation: Annotated[
        bool,
        typer.Option(
            "--simulation", help="All nodes on this machine, by Flower's simulation engine (Ray)."
        ),
    ] = False,
) -> None:
    """Run the server: Flower's SuperLink with TLS and node authentication, until it is stopped.

    Other machines reach the nodes' interface alone; starting runs and registering nodes is for this machine. Runs are
    written to DIR/runs.
    """
    from fedaux.federation import processes
    from fedaux.federation.folder import port_of

    processes.require_flower()
    folder = folder.resolve()
    port = port_of(folder, simulation=simulation)
    arguments = processes.link_arguments(
        folder, host="127.0.0.1" if simulation else host, port=port, simulation=simulation
    )
    os.environ.update(processes.environment(folder / "flower"))
    if simulation:
        os.environ["FEDAUX_NODE"] = str(folder / "nodes" / "simulation.toml")
    os.chdir(folder)
    processes.serve_link(arguments)


@app.command()
def node(
    file: NodeFile,
    superlink: Annotated[str, typer.Option("--superlink", help="The server.", metavar="HOST:PORT")],
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--root-certificates",
            help="The federation's ca.crt.",
            show_default="ca.crt beside the file",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", help="The node's private key.", show_default="node.key beside the file"
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            help="A port of this machine for the node's own processes; nobody else needs it.",
        ),
    ] = 9094,
) -> None:
    """Run a node: Flower's SuperNode, whose work is done by this installation of fedaux, until it is stopped.

    The configuration and the data are checked first. Code that the server sends is neither unpacked nor executed.
    """
    from fedaux.federation import processes

    processes.require_flower()
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
    processes.become_node(command, file=file, state=Path(loaded.state))


@app.command()
def check(
    file: NodeFile,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="Also say what this recipe would ask of the node, and what it would refuse.",
        ),
    ] = None,
) -> None:
    """Check a node's configuration, read its data, and say what would leave this machine. No network is used.

    With --recipe the exit status is 1 where the node would refuse.
    """
    from fedaux.federation.checking import check_node

    console = Console()
    said, willing = check_node(file, recipe=recipe)
    for part in said:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    if not willing:
        raise typer.Exit(1)


@app.command()
def watch(
    directory: Annotated[
        Path, typer.Argument(help="The run directory, at the server.", metavar="RUN_DIR")
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Show the nodes as they are, and end.")
    ] = False,
) -> None:
    """Show who is present, busy or missing, until the run ends."""
    from fedaux.federation.watch import watch as show

    try:
        show(directory, Console(), once=once)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
