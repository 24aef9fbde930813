"""FedAUX (Sattler et al. 2021): start from h0, weight the ensemble by private certainty scores.

Where the steps of the paper are, in order:

    Algorithm 1                          `FedAux.prepare`
      D_aux into D- and D_distill        data/splits.py, called by `ExperimentRunner.task`
      h_0 by self-supervision            pretrain/, called by `Server.start`
      bound of features, public here     core/releases.py, `publish`
      w_i + noise, at the client         core/client.py, `Client.release`, by a mechanism of
                                         privacy/: mean.py by default, paper.py as printed
      s_i(x) on D_distill                core/releases.py, `Scorer.log_scores`
    Algorithm 2                          `FedDF.round`, which calls `soft_labels` below
      select S_t                         core/server.py, `Server._select`
      theta_i <- train(theta, D_i)       core/local_training.py, called by `Server.train`
      f_i(x), theta_i on D_distill       core/server_model.py, called by `Server.predict`
      theta <- mean of theta_i           core/weights.py, `average`
      soft labels (Eq. 3)                core/soft_labels.py, `score_weights` and `mixture`
      distillation (Eq. 1)               core/distillation.py, `distill`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedaux.config import Certainty, ExperimentFields
from fedaux.core.algorithms.feddf import FedDF
from fedaux.core.asks import Asks
from fedaux.core.messages import Member
from fedaux.core.server import Server
from fedaux.core.soft_labels import Mix, score_weights
from fedaux.core.task import State


@dataclass(frozen=True)
class FedAux(FedDF):
    """FedDF that starts from h0 and weights its teacher by certainty scores."""

    mix: Mix = "probabilities"
    """The paper's Eq. 3 averages "logits"; its theory is about probabilities."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask each client for one certainty release, and for a model in every round."""
        asked = super().asks(settings)
        return replace(asked, pretrained=True, releases=(self.certainty(settings),))

    def certainty(self, settings: ExperimentFields) -> Certainty:
        """Return the settings of the certainty release."""
        return settings.certainty

    def prepare(self, server: Server) -> State:
        """Start from h0; let each client release how certain it is of public examples."""
        state = server.start()
        collected = server.collect(self.certainty(server.task.experiment))
        return replace(state, releases=collected.releases)

    def soft_labels(self, server: Server, state: State, members: Sequence[Member]) -> Tensor:
        """Return the certainty-weighted mean of the clients' predictions (Eq. 3, which is
        about logits: `fedaux+logits`)."""
        weights = score_weights(members, server.log_scores(state, members))
        return server.mix(members, weights, of=self.mix)
