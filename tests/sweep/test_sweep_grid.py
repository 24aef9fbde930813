"""From lists in a recipe to cells: every combination, nothing swept that is a list by itself,
mistakes told at once."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.experiments import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaux.config import ConfigError, ExperimentFields, known_keys
from fedaux.recipes import merged, parse_value
from fedaux.sweep import axes_of, cells_of, expand
from fedaux.sweep.grid import cell_names, is_list

LISTS = {
    *(
        "method",
        "seeds",
        "data.clients",
        "data.channel_mean",
        "data.channel_deviation",
        "prototypes",
    ),
    *("prototypes.clients", "pretraining.projection_widths"),
    *("pretraining.augmentation.crop_scale", "pretraining.augmentation.crop_ratio"),
}


def place(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: place(rest, value) if rest else value}


def raw(**values: Any) -> dict[str, Any]:
    """The tiny recipe with values at dotted keys, given with __ for the dot."""
    table = TINY
    for key, value in values.items():
        table = merged(table, place(key.replace("__", "."), value))
    return table


def field_types() -> dict[str, Any]:
    types = {}
    for key in known_keys():
        section: Any = ExperimentFields
        for part in key.split("."):
            annotation = section.model_fields[part].annotation
            kinds = [annotation, *getattr(annotation, "__args__", ())]
            section = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
        types[key] = annotation
    return types


def test_which_fields_are_lists_is_read_off_their_types() -> None:
    found = {key for key, annotation in field_types().items() if is_list(annotation)}
    assert found >= LISTS
    # A new list among the fields is fine; none that holds a single value may be taken for one.
    assert not {
        key
        for key in found
        if key.endswith(("alpha", "epsilon", "model", "options", "path", "clip"))
    }


AXES = {
    "split.alpha": st.floats(0.01, 100),
    "rounds": st.integers(1, 9),
    "certainty.epsilon": st.floats(0.1, 10),
    "mode": st.sampled_from(["full", "linear"]),
    "distillation.weight_decay": st.floats(0.5, 2),
    "pretraining.augmentation.flip": st.floats(0, 1),
}
GRIDS = st.fixed_dictionaries(
    {},
    optional={key: st.lists(of, min_size=1, max_size=2, unique=True) for key, of in AXES.items()},
)


@settings(max_examples=12, deadline=None)
@given(GRIDS)
def test_cells_are_the_product_of_the_lists(axes: dict[str, list[Any]]) -> None:
    table = TINY
    for key, values in axes.items():
        table = merged(table, place(key, values))
    cells = expand(table)
    found = {tuple(cell.settings[key] for key in axes) for cell in cells}
    assert len(cells) == len({cell.name for cell in cells})
    assert found == set(product(*axes.values()))
    for cell in cells:
        flat = cell.experiment.to_dict()
        for key, value in cell.settings.items():
            section = flat
            for part in key.split("."):
                section = section[part]
            assert section == value
        assert "/" not in cell.name
        assert cell.rounds == flat["rounds"]


def test_the_last_key_is_fastest_and_names_tell_what_differs() -> None:
    cells = expand(raw(split__alpha=[0.01, 100.0], certainty__epsilon=[1, 1e-5]))
    assert [cell.name for cell in cells] == [
        *(
            "alpha=0.01,epsilon=1",
            "alpha=0.01,epsilon=1e-05",
            "alpha=100,epsilon=1",
            "alpha=100,epsilon=1e-05",
        )
    ]
    assert cells[3].settings == {"split.alpha": 100.0, "certainty.epsilon": 1e-5}
    assert cells[3].experiment.certainty.epsilon == 1e-5
    assert {cell.experiment.name for cell in cells} == {"tiny"}


def test_lists_of_methods_and_seeds_stay_in_one_run_and_lists_of_lists_do_not() -> None:
    table = raw(method=["fedaux", "feddf+p"], seeds=[0, 1, 2])
    (cell,) = expand(table)
    assert (cell.name, cell.settings, cell.rounds) == ("all", {}, 18)
    cells = expand(raw(method=[["fedaux"], ["feddf+p"]], seeds=[[0], [1], [2]]))
    assert [cell.name for cell in cells] == [
        f"method={method},seeds={seed}" for method in ("fedaux", "feddf+p") for seed in range(3)
    ]
    assert [(cell.experiment.method, cell.experiment.seeds) for cell in cells] == [
        ((method,), (seed,)) for method in ("fedaux", "feddf+p") for seed in range(3)
    ]
    assert [cell.name for cell in expand(raw(seeds=[[0]]))] == ["seeds=0"]


def test_a_list_that_is_a_value_is_not_swept_and_a_list_of_lists_is() -> None:
    value = raw(data__channel_mean=[0.5], pretraining__augmentation__crop_scale=[0.2, 1.0])
    assert axes_of(value) == ({}, {})
    swept = raw(
        pretraining__augmentation__crop_scale=[[0.2, 1.0], [0.5, 1.0]],
        prototypes=[
            [{"name": "small", "model": "cnn", "options": {"width": 4}}],
            [{"name": "small", "model": "cnn"}, {"name": "flat", "model": "mlp"}],
        ],
    )
    assert [cell.name for cell in expand(swept)] == [
        *("prototypes=small,crop_scale=0.2_1", "prototypes=small,crop_scale=0.5_1"),
        *("prototypes=small_flat,crop_scale=0.2_1", "prototypes=small_flat,crop_scale=0.5_1"),
    ]


def test_keys_of_a_prototype_may_be_lists() -> None:
    table = raw(
        prototypes=[{"name": "one", "model": ["cnn", "mlp"]}, {"name": "two", "model": "cnn"}]
    )
    assert [cell.experiment.prototypes[0].model for cell in expand(table)] == ["cnn", "mlp"]
    table = raw(prototypes=[{"name": "one", "model": "cnn", "options": {"width": [4, 8]}}])
    assert [cell.name for cell in expand(table)] == ["width=4", "width=8"]
    assert [cell.experiment.prototypes[0].options for cell in expand(table)] == [
        {"width": 4},
        {"width": 8},
    ]


def test_all_mistakes_of_all_cells_are_told_at_once() -> None:
    wrong = raw(
        **{"name": ["a", "b"], "rounds": [2, 2], "mode": [], "engine__device": ["cpu", "cuda:0"]},
        **{
            "split__alpha": [0.1, -1],
            "split__num_clients": [4, 5000],
            "local__epoch": 3,
            "method": "fedauxx",
        },
        data__channel_mean=[[0.5], 0.5],
    )
    with pytest.raises(ConfigError) as error:
        expand(wrong)
    assert set(error.value.problems) == {
        'name = ["a", "b"]: cannot be swept over; it is the name of the sweep; cells are named '
        "after "
        "their settings",
        "rounds = [2, 2]: 2 appears more than once",
        "mode = []: nothing to sweep over; should have at least 1 item",
        'engine.device = ["cpu", "cuda:0"]: cannot be swept over; it should be one device; use '
        "--devices for several",
        "data.channel_mean = [[0.5], 0.5]: mixes lists and other items; should be one list, or a "
        "list of lists to "
        "sweep over",
        "local.epoch: unknown key; did you mean local.epochs?",
        "method = 'fedauxx': not known; did you mean fedaux or fedaux2?",
        "num_clients=4,alpha=-1 and 1 other cell: split.alpha = -1: should be greater than 0",
        "num_clients=5000,alpha=0.1 and 1 other cell: split.num_clients = 5000: more clients than "
        "the 480 training examples",
    }


def test_a_grid_may_be_given_point_by_point() -> None:
    points = [
        {"split.alpha": 0.1, "method": ["fedavg"]},
        {"split.alpha": 1.0, "method": ["fedaux", "feddf"]},
    ]
    cells = cells_of(TINY, points)
    assert [cell.name for cell in cells] == [
        "alpha=0.1,method=fedavg",
        "alpha=1,method=fedaux_feddf",
    ]
    assert cells[1].experiment.method == ("fedaux", "feddf")
    with pytest.raises(ConfigError, match=r"alpha=0\.1: 2 cells have the same settings"):
        cells_of(TINY, [{"split.alpha": 0.1}, {"split.alpha": 0.1}, {"split.alpha": 0.2}])
    with pytest.raises(ConfigError, match="there is no cell to run"):
        cells_of(TINY, [])
    with pytest.raises(ConfigError, match=r"prototypes\.7\.model: is no key of the recipe"):
        cells_of(TINY, [{"prototypes.7.model": "cnn"}])


def test_names_are_short_safe_and_never_the_same() -> None:
    names = cell_names([{"auxiliary.path": "/data/a/train"}, {"auxiliary.path": "/data/b/train"}])
    assert len(set(names)) == 2
    assert all(name.startswith("path=train-") for name in names)
    assert cell_names([{"auxiliary.path": "/data/a b/tr:ain"}]) == ["path=tr-ain"]
    assert cell_names([{"local.epochs": 1, "distillation.epochs": 2}]) == [
        "local.epochs=1,distillation.epochs=2"
    ]
    assert cell_names([{"data.skip_bad": True}, {"data.skip_bad": False}]) == [
        "skip_bad=true",
        "skip_bad=false",
    ]
    (long,) = cell_names([{f"a.{number}{'x' * 20}": 1 for number in range(9)}])
    assert len(long) <= 120
    assert Path(long).name == long


def test_lists_on_the_command_line_may_hold_words_and_lists() -> None:
    assert parse_value("[fedaux, feddf+p]") == ["fedaux", "feddf+p"]
    assert parse_value("[[fedaux, feddf+p], [fedavg]]") == [["fedaux", "feddf+p"], ["fedavg"]]
    assert parse_value("[[0.2, 1.0], [0.5, 1.0]]") == [[0.2, 1.0], [0.5, 1.0]]


def test_alpha_is_not_swept_where_clients_have_their_own_data() -> None:
    table = raw(split__alpha=[0.1, 1.0], data__clients=["a.csv", "b.csv"])
    with pytest.raises(ConfigError, match=r"split\.alpha: has no effect beside data\.clients"):
        expand(table)
