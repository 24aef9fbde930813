"""FedAUXfdp's heads: each client releases a linear classifier on h0's features once, with noise.

The server keeps them as what it remembers of the clients. They teach on public data in every round,
and the student starts at their average (Hoech et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from fedaux.core.messages import Clients, ClientState, ScoreRelease, Weights
from fedaux.core.methods import head_section
from fedaux.core.preparation import release_scores
from fedaux.core.private_head import require_linear
from fedaux.core.task import Preparation, State, Task, build_models, extract
from fedaux.core.teachers import Member
from fedaux.core.weights import average_by_prototype, own_weights
from fedaux.privacy.heads import layer_of
from fedaux.privacy.mechanism import Public
from fedaux.privacy.mechanisms import MECHANISMS, publish_map


def release_heads(
    task: Task,
    clients: Clients,
    state: State,
    chosen: Sequence[int],
    *,
    extractors: Mapping[str, Weights],
    settle: Callable[[dict[str, Public], str | None], dict[str, Public]],
) -> tuple[State, int, int]:
    """Ask clients for heads; return the state with these, their price and their average as each
    prototype's head, and bytes down and up.

    Raises ValueError for a head that is no linear layer, and if no client releases one.
    """
    section = head_section(task.experiment.certainty)
    mechanism, public = MECHANISMS[section.mechanism](section), dict[str, Public]()
    for name, model in build_models(task).items():
        require_linear(model.head, prototype=name)
        negatives = extract(task, name, extractors[name], task.negatives)
        public[name] = publish_map(mechanism, negatives, num_classes=task.num_classes)
    public = settle(public, section.mechanism)
    released: Mapping[int, ScoreRelease] = {}
    if chosen:
        released, wasted, down, up = release_scores(
            task, clients, chosen, extractors=extractors, public=public, section=section
        )
    if not released:
        reasons = sorted(clients.reasons().items())
        why = "".join(f"; client {client}: {text}" for client, text in reasons)
        raise ValueError(f"no client released a head{why}")
    memory = {}
    for client, one in released.items():
        weight, bias = layer_of(one.vector.to(task.device), public[task.prototype_of[client]])
        head = {"weights/head.weight": weight, "weights/head.bias": bias}
        examples = torch.tensor(one.entry.num_examples)
        memory[client] = ClientState(0, head | {"num_examples": examples})
    averages = average_by_prototype(members_of(task, memory))
    weights = {name: {**own, **averages.get(name, {})} for name, own in state.weights.items()}
    spent = (*wasted, *(one.entry for one in released.values()))
    return replace(state, weights=weights, memory=memory, ledger=spent), down, up


def members_of(task: Task, memory: Mapping[int, ClientState]) -> list[Member]:
    """Return the clients' heads as members, without the features below them."""
    return [
        Member(
            client,
            task.prototype_of[client],
            int(kept.tensors["num_examples"]),
            own_weights(kept),
        )
        for client, kept in sorted(memory.items())
    ]


def head_members(task: Task, preparation: Preparation, state: State) -> list[Member]:
    """Return the clients' heads as members that can predict; where whole networks are trained, on
    h0."""
    members = members_of(task, state.memory)
    if task.experiment.mode == "linear":
        return members
    below = {
        name: {f"features.{key}": tensor for key, tensor in own.items()}
        for name, own in preparation.extractors.items()
    }
    return [
        replace(member, weights={**below[member.prototype], **member.weights}) for member in members
    ]
