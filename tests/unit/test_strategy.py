"""What a strategy means: the flag, Paddle's own fields, the degrees; and broadcasting through a fake communicator."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from paddle.distributed.fleet import DistributedStrategy as PaddleStrategy

from hp_sharding.config import ShardingConfig
from hp_sharding.errors import ConfigError
from hp_sharding.fleet.strategy import (
    Degrees,
    DistributedStrategy,
    needs_equal_inputs,
    resolve_degrees,
    sharding_config,
    with_degrees,
)


def _strategy(
    own: dict[str, Any] | None = None,
    paddle_fields: dict[str, Any] | None = None,
    degrees: dict[str, int] | None = None,
) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.hybrid_configs = degrees or {}
    if own is not None:
        strategy.hp_sharding_configs = own
    if paddle_fields is not None:
        strategy.hybrid_configs = {"sharding_configs": paddle_fields}
    return strategy


class TestFlag:
    def test_is_a_paddle_strategy(self) -> None:
        assert isinstance(DistributedStrategy(), PaddleStrategy)

    def test_reads_back_what_was_set(self) -> None:
        strategy = DistributedStrategy()
        assert dict(strategy.hp_sharding_configs) == {}
        strategy.hp_sharding_configs = {"stage": 1, "timeline": True}
        assert dict(strategy.hp_sharding_configs) == {"stage": 1, "timeline": True}
        strategy.hp_sharding_configs = {"stage": 2}
        assert dict(strategy.hp_sharding_configs) == {"stage": 2}

    def test_a_change_in_place_is_an_error_not_a_no_op(self) -> None:
        strategy = _strategy({"stage": 1})
        with pytest.raises(TypeError):
            strategy.hp_sharding_configs["stage"] = 2  # type: ignore[index]
        given = {"stage": 1}
        strategy.hp_sharding_configs = given
        given["stage"] = 2
        assert sharding_config(strategy).stage == 1

    def test_a_refused_assignment_leaves_the_earlier_one(self) -> None:
        strategy = _strategy({"stage": 1})
        with pytest.raises(ConfigError, match="did you mean 'stage'"):
            strategy.hp_sharding_configs = {"stge": 2}
        with pytest.raises(ConfigError, match="reduce_overlap='yes'"):
            strategy.hp_sharding_configs = {"reduce_overlap": "yes"}
        assert dict(strategy.hp_sharding_configs) == {"stage": 1}

    def test_strategies_do_not_share_it(self) -> None:
        _strategy({"stage": 1})
        assert dict(DistributedStrategy().hp_sharding_configs) == {}

    def test_survives_deepcopy(self) -> None:
        strategy = copy.deepcopy(_strategy({"stage": 1}, {"comm_overlap": True}, {"sharding_degree": 2}))
        assert type(strategy) is DistributedStrategy
        assert sharding_config(strategy) == ShardingConfig(stage=1, reduce_overlap=True)
        assert resolve_degrees(strategy, 2) == Degrees(1, 2)


class TestHybridConfigs:
    def test_merges_as_paddle_does(self) -> None:
        strategy = _strategy(degrees={"dp_degree": 1})
        strategy.hybrid_configs = {"sharding_degree": np.int64(4), "mp_configs": {"sync_param": True}}
        assert strategy.hybrid_configs["dp_degree"] == 1
        assert strategy.hybrid_configs["sharding_degree"] == 4
        assert strategy.hybrid_configs["mp_configs"].sync_param

    def test_does_not_take_keys_out_of_the_dict_it_is_given(self) -> None:
        given = {
            "mp_configs": {"sync_param_name": ["norm"]},
            "sharding_configs": {"comm_overlap": True},
            "pp_configs": {},
        }
        before = copy.deepcopy(given)
        DistributedStrategy().hybrid_configs = given
        assert given == before

    def test_order_reaches_paddle(self) -> None:
        order = ["dp", "pp", "sharding", "mp", "sep", "cp"]
        strategy = DistributedStrategy()
        strategy.hybrid_configs = {"order": order}
        assert strategy.hybrid_parallel_order == order

    @pytest.mark.parametrize(
        ("configs", "message"),
        [
            ({"sharding_degre": 2}, "did you mean 'sharding_degree'"),
            ({"sharding_degree": "2"}, "sharding_degree='2'"),
            ({"dp_degree": True}, "dp_degree=True"),
            ({"dp_degree": 1.0}, "dp_degree=1.0"),
            ({"sharding_configs": {"comm_overlp": True}}, "did you mean 'comm_overlap'"),
            ({"sharding_configs": {"comm_buffer_size_MB": 2.5}}, "'comm_buffer_size_MB'.*2.5"),
            ({"sharding_configs": {"comm_overlap": "yes"}}, "'comm_overlap'.*'yes'"),
            ({"sharding_configs": True}, "expected a dict, got bool"),
            ({"dp_configs": {}}, "dp_configs"),
            ([("dp_degree", 1)], "expected a dict, got list"),
        ],
    )
    def test_a_refused_assignment_changes_nothing(self, configs: Any, message: str) -> None:
        strategy = _strategy(paddle_fields={"comm_buffer_size_MB": 7}, degrees={"mp_degree": 1})
        before = str(strategy.strategy.hybrid_configs)
        if isinstance(configs, dict):
            configs = {"order": ["mp"], "sep_degree": 3, "sharding_configs": {"comm_overlap": True}} | configs
        with pytest.raises(ConfigError, match=message):
            strategy.hybrid_configs = configs
        assert str(strategy.strategy.hybrid_configs) == before
        assert strategy.hybrid_parallel_order == DistributedStrategy().hybrid_parallel_order

    def test_a_sub_message_taken_earlier_stays_connected(self) -> None:
        strategy = DistributedStrategy()
        fields = strategy.hybrid_configs["sharding_configs"]
        with pytest.raises(ConfigError):
            strategy.hybrid_configs = {"dp_degree": 1, "sharding_configs": {"comm_overlap": "yes"}}
        strategy.hybrid_configs = {"dp_degree": 1, "sharding_configs": {"comm_buffer_size_MB": 3}}
        fields.comm_overlap = True
        assert sharding_config(strategy) == ShardingConfig(reduce_overlap=True, comm_buffer_size_MB=3)


class TestShardingConfig:
    def test_defaults(self) -> None:
        """Paddle's own defaults, a 256 MB buffer and use_reduce_avg among them, do not count."""
        assert sharding_config(None) == ShardingConfig()
        assert sharding_config(DistributedStrategy()) == ShardingConfig()
        assert sharding_config(PaddleStrategy()) == ShardingConfig()

    def test_takes_the_flag(self) -> None:
        own = {"stage": 1, "allgather_overlap": True, "gradient_scale": "sum"}
        assert sharding_config(_strategy(own)) == ShardingConfig.from_dict(own)

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"comm_overlap": True}, {"reduce_overlap": True}),
            ({"comm_overlap": False}, {}),
            ({"comm_buffer_size_MB": 64}, {"comm_buffer_size_MB": 64}),
            ({"comm_buffer_size_MB": 256}, {"comm_buffer_size_MB": 256}),
            ({"accumulate_steps": 4}, {}),
            ({"use_reduce_avg": True}, {}),
            ({"use_reduce_avg": False}, {}),
            ({"release_gradients": True}, {"stage": 2}),
            ({"release_gradients": False}, {"stage": 1}),
            ({"free_grads_in_comm": True}, {"stage": 2}),
            ({"free_grads_in_comm": False}, {"stage": 1}),
            ({"release_gradients": True, "free_grads_in_comm": False}, {"stage": 2}),
            ({"release_gradients": False, "free_grads_in_comm": True}, {"stage": 2}),
            ({"split_param": True}, {}),
            ({"tensor_fusion": True}, {"comm_fusion": True}),
            ({"tensor_fusion": False, "fuse_optimizer": True, "offload_opt_buffer_size": -1}, {}),
        ],
    )
    def test_honours_paddles_fields(self, fields: dict[str, Any], expected: dict[str, Any]) -> None:
        wanted = ShardingConfig.from_dict(expected)
        assert sharding_config(_strategy(paddle_fields=fields)) == wanted
        assert sharding_config(_strategy(expected, fields)) == wanted, "the same said twice is no contradiction"
        theirs = PaddleStrategy()
        for name, value in fields.items():
            setattr(theirs.hybrid_configs["sharding_configs"], name, value)
        assert sharding_config(theirs) == wanted, "Paddle's own class and way of setting fields count too"

    @pytest.mark.parametrize(
        ("own", "fields", "names"),
        [
            ({"reduce_overlap": False}, {"comm_overlap": True}, ("reduce_overlap", "comm_overlap")),
            ({"reduce_overlap": True}, {"comm_overlap": False}, ("reduce_overlap", "comm_overlap")),
            (
                {"comm_buffer_size_MB": 25},
                {"comm_buffer_size_MB": 26},
                ("comm_buffer_size_MB'", ".comm_buffer_size_MB"),
            ),
            ({"stage": 1}, {"release_gradients": True}, ("stage", "release_gradients=True")),
            ({"stage": 2}, {"release_gradients": False}, ("stage", "release_gradients=False")),
            ({"stage": 1}, {"free_grads_in_comm": True}, ("stage", "free_grads_in_comm=True")),
            ({"comm_fusion": False}, {"tensor_fusion": True}, ("comm_fusion", "tensor_fusion")),
        ],
    )
    def test_a_contradiction_names_both(
        self, own: dict[str, Any], fields: dict[str, Any], names: tuple[str, str]
    ) -> None:
        with pytest.raises(ConfigError, match="contradicts") as error:
            sharding_config(_strategy(own, fields))
        for name in names:
            assert name in str(error.value)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("split_param", False),
            ("fuse_optimizer", False),
            ("enable_fuse_optimizer_states", True),
            ("offload_opt_buffer_size", 1),
        ],
    )
    def test_refuses_what_cannot_be_honoured(self, field: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"{field}={value} cannot be honoured"):
            sharding_config(_strategy(paddle_fields={field: value}))

    def test_refuses_settings_of_paddles_communicators(self) -> None:
        strategy = DistributedStrategy()
        strategy.hybrid_configs["sharding_configs"].nccl_config.SetInParent()
        with pytest.raises(ConfigError, match="nccl_config"):
            sharding_config(strategy)

    @pytest.mark.parametrize(("field", "value"), [("accumulate_steps", 0), ("comm_buffer_size_MB", 0)])
    def test_refuses_values_out_of_range(self, field: str, value: int) -> None:
        with pytest.raises(ConfigError, match=field):
            sharding_config(_strategy(paddle_fields={field: value}))

    def test_every_field_of_paddles_table_is_decided(self) -> None:
        """A field that a later Paddle adds is refused once it is set to something, never ignored."""
        descriptor = DistributedStrategy().strategy.hybrid_configs.sharding_configs.DESCRIPTOR
        ignored = []
        for field in descriptor.fields:
            strategy = DistributedStrategy()
            message = strategy.hybrid_configs["sharding_configs"]
            if field.message_type is not None:
                getattr(message, field.name).SetInParent()
            else:
                setattr(message, field.name, (not field.default_value) if field.type == field.TYPE_BOOL else 3)
            try:
                if sharding_config(strategy) == ShardingConfig():
                    ignored.append(field.name)
            except ConfigError:
                continue
        assert sorted(ignored) == [
            "accumulate_steps",
            "free_grads_in_comm",
            "release_gradients",
            "split_param",
            "tensor_fusion",
            "use_reduce_avg",
        ], "these ask for what the defaults already are, or are hints"

    @pytest.mark.parametrize("switch", ["amp", "sharding", "heter_ccl_mode"])
    def test_refuses_switches_of_paddle_that_would_be_ignored(self, switch: str) -> None:
        strategy = DistributedStrategy()
        setattr(strategy, switch, True)
        with pytest.raises(ConfigError, match=f"strategy.{switch}=True is not supported"):
            sharding_config(strategy)

    @pytest.mark.parametrize("switch", ["sync_param", "sync_grad", "sync_moment"])
    def test_refuses_to_send_again_what_split_layers_have_in_common(self, switch: str) -> None:
        strategy = DistributedStrategy()
        assert sharding_config(strategy) == ShardingConfig(), "Paddle's own default does not count"
        setattr(strategy.hybrid_configs["mp_configs"], switch, True)
        with pytest.raises(ConfigError, match=f"{switch}=True is not supported"):
            sharding_config(strategy)

    def test_split_layers_get_equal_inputs_unless_the_strategy_says_no(self) -> None:
        strategy = DistributedStrategy()
        assert needs_equal_inputs(None) and needs_equal_inputs(strategy)
        strategy.hybrid_configs["mp_configs"].need_broadcast_data = False
        assert not needs_equal_inputs(strategy)

    def test_defaults_hold_where_the_strategy_sets_nothing(self) -> None:
        strategy = _strategy({"stage": 1}, paddle_fields={"comm_overlap": True})
        assert sharding_config(strategy, {"stage": 3, "timeline": True}) == ShardingConfig(
            stage=1, reduce_overlap=True, timeline=True
        )
        assert sharding_config(None, {"stage": 3}) == ShardingConfig(stage=3)
        with pytest.raises(ConfigError, match="contradicts"):
            sharding_config(strategy, {"reduce_overlap": False})

    def test_refuses_what_is_no_strategy(self) -> None:
        with pytest.raises(ConfigError, match="got dict"):
            sharding_config({"stage": 1})


class TestDegrees:
    @pytest.mark.parametrize(
        ("degrees", "world", "expected"),
        [
            ({}, 1, Degrees(1, 1)),
            ({}, 4, Degrees(1, 4)),
            ({"mp_degree": 1, "pp_degree": 1, "sep_degree": 0}, 4, Degrees(1, 4)),
            ({"sharding_degree": 4}, 4, Degrees(1, 4)),
            ({"dp_degree": 1, "sharding_degree": 2}, 2, Degrees(1, 2)),
            ({"dp_degree": -1, "sharding_degree": 2}, 2, Degrees(1, 2)),
            ({"dp_degree": 0, "sharding_degree": 2}, 2, Degrees(1, 2)),
            ({"dp_degree": 1, "sharding_degree": 1}, 1, Degrees(1, 1)),
            ({"dp_degree": -1}, 1, Degrees(1, 1)),
            ({"dp_degree": 2, "sharding_degree": 2}, 4, Degrees(2, 2)),
            ({"dp_degree": -1, "sharding_degree": 2}, 4, Degrees(2, 2)),
            ({"sharding_degree": 2}, 8, Degrees(4, 2)),
            ({"dp_degree": -1}, 2, Degrees(2, 1)),
            ({"dp_degree": 4, "sharding_degree": 1}, 4, Degrees(4, 1)),
            ({"mp_degree": 2}, 4, Degrees(1, 2, 2)),
            ({"mp_degree": 2}, 2, Degrees(1, 1, 2)),
            ({"mp_degree": 0, "sharding_degree": 2}, 4, Degrees(2, 2)),
            ({"mp_degree": 2, "sharding_degree": 2}, 4, Degrees(1, 2, 2)),
            ({"mp_degree": 2, "sharding_degree": 2}, 8, Degrees(2, 2, 2)),
            ({"mp_degree": 4, "dp_degree": 2, "sharding_degree": 1}, 8, Degrees(2, 1, 4)),
        ],
    )
    def test_resolves(self, degrees: dict[str, int], world: int, expected: Degrees) -> None:
        assert resolve_degrees(_strategy(degrees=degrees), world) == expected

    def test_without_a_strategy_all_ranks_form_one_group(self) -> None:
        assert resolve_degrees(None, 3) == Degrees(1, 3)

    @pytest.mark.parametrize(
        ("degrees", "world", "message"),
        [
            ({"sharding_degree": 3}, 4, "sharding_degree=3 does not divide 4 ranks"),
            ({"sharding_degree": 8}, 4, "sharding_degree=8 does not divide 4 ranks"),
            ({"sharding_degree": 2}, 1, "does not divide 1 rank; start it with python -m paddle.distributed.launch"),
            ({"sharding_degree": 0}, 2, "sharding_degree=0: expected 1 or more"),
            ({"sharding_degree": -1}, 2, "sharding_degree=-1: expected 1 or more"),
            ({"dp_degree": 1}, 2, "dp_degree=1 times sharding_degree=1 is 1, but the job has 2 ranks"),
            ({"dp_degree": 2, "sharding_degree": 4}, 4, "is 8, but the job has 4 ranks"),
            ({"mp_degree": 3}, 4, "mp_degree=3 does not divide 4 ranks"),
            ({"mp_degree": 2, "sharding_degree": 4}, 4, "does not divide 4 ranks in groups of mp_degree=2"),
            ({"mp_degree": 2, "sharding_degree": 2, "dp_degree": 2}, 4, "times mp_degree=2 is 8, but the job has 4"),
            ({"pp_degree": 2, "sharding_degree": 2}, 4, "pp_degree=2 is not supported beside sharding: a pipeline"),
            ({"sep_degree": 2}, 2, "sep_degree=2"),
            ({"cp_degree": 2}, 2, "cp_degree=2"),
            ({"ep_degree": 2}, 2, "ep_degree=2"),
            ({"moe_sharding_degree": 2}, 2, "moe_sharding_degree=2"),
            ({"mp_degree": -1}, 2, "mp_degree=-1: expected 1 or more"),
        ],
    )
    def test_refuses(self, degrees: dict[str, int], world: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve_degrees(_strategy(degrees=degrees), world)

    def test_every_degree_of_paddles_table_is_looked_at(self) -> None:
        fields = DistributedStrategy().strategy.hybrid_configs.DESCRIPTOR.fields_by_name
        for name in fields:
            if name.endswith("_degree"):
                with pytest.raises(ConfigError, match=name):
                    resolve_degrees(_strategy(degrees={name: 7}), 2)

    def test_a_copy_for_paddle_holds_the_resolved_degrees(self) -> None:
        strategy = _strategy({"stage": 1})
        resolved = with_degrees(strategy, Degrees(1, 4, 2))
        assert resolved.hybrid_configs["mp_degree"] == 2
        assert resolved.hybrid_configs["dp_degree"] == 1
        assert resolved.hybrid_configs["sharding_degree"] == 4
        assert resolve_degrees(strategy, 2) == Degrees(1, 2), "the user's own strategy is as it was"
        assert sharding_config(with_degrees(None, Degrees(1, 4))) == ShardingConfig()
