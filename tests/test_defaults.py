"""What the paper says of its settings, and SimCLR of its own, is what the defaults and the recipes
do."""

from __future__ import annotations

import torch
from helpers.blobs import blobs, extractor, seeded

import fedaux
from fedaux.config import Augmentation, Pretraining
from fedaux.pretrain.training import Training
from fedaux.recipes import find_recipe, load_experiment


def test_pretraining_is_simclr_as_the_paper_trains_it() -> None:
    section = Pretraining()
    assert (section.temperature, section.projection_widths, section.epochs) == (
        0.5,
        (512, 128),
        100,
    )
    assert (section.optimizer, section.learning_rate, section.batch_size) == ("adam", 1e-3, 512)
    assert (section.weight_decay, section.schedule, section.warmup_epochs) == (0.0, "constant", 0)
    assert not section.projection_batch_norm


def test_views_are_those_of_simclr_at_half_strength() -> None:
    strength = 0.5  # as SimCLR has it for small images; its jitter is 0.8, 0.8, 0.8 and 0.2 of it
    views = Augmentation()
    found = (views.brightness, views.contrast, views.saturation, views.hue)
    assert found == (0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)
    assert (views.jitter, views.greyscale, views.flip) == (0.8, 0.2, 0.5)
    assert (views.crop_scale, views.crop_ratio) == ((0.08, 1.0), (3 / 4, 4 / 3))
    assert (views.rotation, views.shear) == (0.0, 0.0)


def test_training_takes_the_defaults() -> None:
    training = Training(
        extractor(), blobs(520), feature_width=16, section=Pretraining(), generator=seeded()
    )
    head = [
        list(weight.shape)
        for name, weight in training._model.named_parameters()
        if weight.ndim == 2
    ][-2:]
    assert head == [[512, 16], [128, 512]]
    assert type(training._optimizer) is torch.optim.Adam
    assert {group["lr"] for group in training._optimizer.param_groups} == {1e-3}
    assert training._batch_size == 512


def test_agnews_is_the_experiment_of_the_appendix() -> None:
    experiment = load_experiment(find_recipe("agnews"))
    assert (experiment.split.num_clients, experiment.participation_rate) == (10, 1.0)
    for section in (experiment.local, experiment.distillation):
        assert (section.optimizer, section.learning_rate, section.epochs, section.batch_size) == (
            "adam",
            1e-5,
            1,
            32,
        )
    assert experiment.distillation.steps is None
    assert (experiment.certainty.epsilon, experiment.certainty.delta) == (0.1, 1e-5)
    assert experiment.certainty.regularisation == 0.01
    assert experiment.auxiliary.negatives_fraction == 0.5  # 160,000 each
    assert [prototype.model for prototype in experiment.prototypes] == ["tinybert"]
    assert experiment.method == ("fedavg+p", "feddf+p", "fedaux")


def test_heads_have_learning_rates_of_their_own() -> None:
    """A rate that is given counts, and so does another optimizer's default."""
    heads = fedaux.Experiment(mode="linear", distillation={"learning_rate": 0.5})
    assert (heads.local.optimizer, heads.local.learning_rate) == ("sgd", 0.1)
    assert heads.distillation.learning_rate == 0.5
    other = fedaux.Experiment(mode="linear", local={"optimizer": "adam"})
    assert (other.local.learning_rate, other.distillation.learning_rate) == (0.01, 0.001)
    assert fedaux.Experiment(mode="full").local.learning_rate == 0.001
