"""Which layers become units, and whose each parameter is."""

from __future__ import annotations

import paddle
from paddle import nn

from hp_sharding.units import UnitPlan, find_units


def _names(plan: UnitPlan) -> list[str]:
    return [unit.name for unit in plan.units]


def _owners(plan: UnitPlan) -> dict[str, str]:
    return {entry.name: plan.units[entry.unit].name for entry in plan.params}


class _Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class _Gpt(nn.Layer):
    """Embeddings, blocks in a LayerList, a head tied to the embedding, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([1])
        self.embedding = nn.Embedding(10, 4)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.LayerList([_Block() for _ in range(3)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight


def test_a_gpt_has_its_blocks_and_the_layers_beside_them() -> None:
    plan = find_units(_Gpt(), "auto")
    assert _names(plan) == ["_Gpt", "embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    owners = _owners(plan)
    assert owners["scale"] == "_Gpt"
    assert owners["blocks.1.mlp.2.bias"] == "blocks.1"
    assert owners["embedding.weight"] == "embedding"
    assert owners["head.bias"] == "head"
    assert "head.weight" not in owners


def test_names_and_order_are_those_of_state_dict() -> None:
    model = _Gpt()
    plan = find_units(model, "auto")
    expected = {id(param): name for name, param in reversed(list(model.named_parameters()))}
    assert {id(entry.param): entry.name for entry in plan.params} == expected
    assert [entry.name for entry in plan.params] == [name for name, _ in model.named_parameters()]


def test_units_come_in_registration_order_and_are_the_layers_themselves() -> None:
    model = _Gpt()
    plan = find_units(model, "auto")
    assert plan.units[0].layer is model
    assert [unit.layer for unit in plan.units[2:5]] == list(model.blocks)
    assert [entry.unit for entry in plan.params] == sorted(entry.unit for entry in plan.params)


def test_only_tied_parameters_are_marked() -> None:
    plan = find_units(_Gpt(), "auto")
    assert [entry.name for entry in plan.params if entry.tied] == ["embedding.weight"]


def test_a_layer_held_twice_is_one_unit_at_its_first_place() -> None:
    shared = nn.Linear(2, 2)
    plan = find_units(nn.Sequential(shared, nn.ReLU(), nn.Linear(2, 3), shared), "auto")
    assert _names(plan) == ["Sequential", "0", "2"]
    assert [entry.name for entry in plan.params] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_layer_in_two_parents_is_one_unit_and_its_parameters_are_tied() -> None:
    shared = nn.Linear(2, 2)
    blocks = [nn.Layer(), nn.Layer()]
    for block in blocks:
        block.own, block.shared = nn.Linear(2, 2), shared
    plan = find_units(nn.LayerList(blocks), [nn.Linear])
    assert _names(plan) == ["LayerList", "0.own", "0.shared", "1.own"]
    assert [entry.name for entry in plan.params if entry.tied] == ["0.shared.weight", "0.shared.bias"]


def test_each_layer_of_a_sequential_is_a_unit_and_layers_without_parameters_are_none() -> None:
    plan = find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Dropout()), "auto")
    assert _names(plan) == ["Sequential", "0", "2"]


def test_an_outermost_list_is_not_searched_for_lists_inside() -> None:
    """The item of the outer list is the unit, though it holds a Sequential."""
    plan = find_units(nn.Sequential(_Block(), _Block()), "auto")
    assert _names(plan) == ["Sequential", "0", "1"]


def test_a_list_of_lists_is_searched_since_lists_are_never_called() -> None:
    model = nn.Layer()
    model.stages = nn.LayerList([nn.LayerList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.LayerList([nn.Linear(2, 3)])])
    assert _names(find_units(model, "auto")) == ["Layer", "stages.0.0", "stages.0.1", "stages.1.0"]


def test_a_sequential_in_a_list_is_called_and_so_a_unit() -> None:
    model = nn.Layer()
    model.stages = nn.LayerList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)])
    assert _names(find_units(model, "auto")) == ["Layer", "stages.0", "stages.1"]


def test_a_layer_on_the_way_to_a_list_is_a_unit_for_what_it_holds_itself() -> None:
    model = nn.Layer()
    model.encoder = _Gpt()
    model.head = nn.Linear(4, 2)
    plan = find_units(model, "auto")
    assert _names(plan)[:4] == ["Layer", "encoder", "encoder.embedding", "encoder.blocks.0"]
    assert _names(plan)[-1] == "head"
    assert _owners(plan)["encoder.scale"] == "encoder"


def test_a_sequential_inside_a_layer_is_found() -> None:
    model = nn.Layer()
    model.encoder = nn.Layer()
    model.encoder.net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model.encoder.head = nn.Linear(2, 2)
    plan = find_units(model, "auto")
    assert _names(plan) == ["Layer", "encoder", "encoder.net", "encoder.net.0", "encoder.net.2", "encoder.head"]


def test_items_of_a_layer_dict_are_units() -> None:
    model = nn.Layer()
    model.towers = nn.LayerDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)})
    plan = find_units(model, "auto")
    assert _names(plan) == ["Layer", "towers.left", "towers.right"]
    assert _owners(plan)["towers.right.bias"] == "towers.right"


def test_a_parameter_list_belongs_to_whoever_uses_it() -> None:
    """Nobody calls a ParameterList: a hook on it would never fire."""
    model = nn.Layer()
    model.weights = nn.ParameterList([paddle.create_parameter([2, 2], "float32") for _ in range(2)])
    model.blocks = nn.LayerList([nn.Linear(2, 2)])
    plan = find_units(model, "auto")
    assert [entry.name for entry in plan.params[:2]] == ["weights.0", "weights.1"]
    owner = plan.units[plan.params[0].unit]
    assert not isinstance(owner.layer, nn.ParameterList)
    assert owner.layer is model


def test_classes_choose_the_units() -> None:
    model = _Gpt()
    plan = find_units(model, [nn.Linear])
    assert _names(plan)[:4] == ["_Gpt", "blocks.0.attention", "blocks.0.mlp.0", "blocks.0.mlp.2"]
    assert _owners(plan)["embedding.weight"] == "_Gpt"
    assert _owners(plan)["norm.weight"] == "_Gpt"


def test_a_parameter_belongs_to_the_innermost_chosen_layer() -> None:
    plan = find_units(_Gpt(), (_Block, nn.Linear))
    owners = _owners(plan)
    assert owners["blocks.2.attention.weight"] == "blocks.2.attention"
    assert _names(find_units(_Gpt(), (_Block, nn.Sequential)))[1:3] == ["blocks.0", "blocks.0.mlp"]


def test_classes_that_the_model_lacks_leave_the_root() -> None:
    assert _names(find_units(_Gpt(), [nn.Conv2D])) == ["_Gpt"]


def test_a_model_that_is_one_layer() -> None:
    plan = find_units(nn.Linear(2, 3), "auto")
    assert _names(plan) == ["Linear"]
    assert [entry.name for entry in plan.params] == ["weight", "bias"]


def test_a_missing_parameter_is_left_out() -> None:
    plan = find_units(nn.Sequential(nn.Linear(2, 3, bias_attr=False)), "auto")
    assert [entry.name for entry in plan.params] == ["0.weight"]
