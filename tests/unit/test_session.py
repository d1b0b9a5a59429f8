"""The order of calls on the fleet face, with Paddle's own ``fleet.init`` and our ``shard`` replaced by recorders."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

import paddle
import paddle.distributed.fleet as paddle_fleet
import pytest

from hp_sharding import fleet
from hp_sharding.config import ShardingConfig
from hp_sharding.errors import ConfigError
from hp_sharding.fleet import session as session_module
from hp_sharding.fleet.session import Session
from hp_sharding.fleet.strategy import Degrees, DistributedStrategy


class _Sharded:
    """What the replaced ``shard_over`` returns: the arguments it was called with."""

    def __init__(
        self, model: paddle.nn.Layer, optimizer: Any, config: ShardingConfig, *, lanes: dict[str, Any]
    ) -> None:
        self.model, self.optimizer, self.config, self.lanes = model, optimizer, config, lanes


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Degrees and backend of every start of Paddle's environment, none of which happens."""
    calls: list[Any] = []
    monkeypatch.setattr(session_module, "_init_paddle", lambda *args: calls.append(args))
    monkeypatch.setattr(session_module, "shard_over", _Sharded)
    return calls


@pytest.fixture
def session(inits: list[Any]) -> Session:
    fresh = Session()
    fresh.init(strategy=_strategy(stage=1))
    return fresh


@pytest.fixture
def static_mode() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()


def _strategy(degrees: dict[str, int] | None = None, **own: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.hybrid_configs = degrees or {}
    strategy.hp_sharding_configs = own
    return strategy


def _sgd(*models: paddle.nn.Layer) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.SGD(parameters=[p for model in models for p in model.parameters()])


class TestInit:
    @pytest.mark.parametrize("call", ["distributed_model", "distributed_optimizer", "distributed_scaler"])
    def test_comes_first(self, call: str, inits: list[Any]) -> None:
        with pytest.raises(ConfigError, match=f"fleet.{call} was called before fleet.init"):
            getattr(Session(), call)(paddle.nn.Linear(1, 1))

    def test_returns_paddles_fleet_and_logs_once(
        self, inits: list[Any], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        strategy = _strategy(stage=1)
        with caplog.at_level(logging.DEBUG, logger="hp_sharding"):
            assert Session().init(strategy=strategy) is paddle_fleet.fleet
        assert [record.levelname for record in caplog.records if record.name == "hp_sharding"] == ["INFO"]
        assert "stage=1" in caplog.text
        assert capsys.readouterr().out == ""

    def test_paddles_groups_are_made_where_they_cannot_collide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[str] = []

        @contextlib.contextmanager
        def apart() -> Iterator[None]:
            events.append("enter")
            yield
            events.append("leave")

        def paddle_init(**arguments: Any) -> None:
            events.append(
                f"init {arguments['is_collective']} {arguments['strategy'].hybrid_configs['sharding_degree']}"
            )

        monkeypatch.setattr(session_module, "collision_free_groups", apart)
        monkeypatch.setattr(session_module, "paddle_init", paddle_init)
        Session().init(strategy=_strategy())
        assert events == ["enter", "init True 1", "leave"]

    def test_only_rank_0_logs(
        self, inits: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(paddle.distributed, "get_rank", lambda: 1)
        with caplog.at_level(logging.DEBUG, logger="hp_sharding"):
            Session().init()
        assert not [record for record in caplog.records if record.name == "hp_sharding"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"is_collective": False}, "parameter-server mode"),
            ({"role_maker": DistributedStrategy()}, "role_maker is a DistributedStrategy"),
            ({"role_maker": paddle_fleet.PaddleCloudRoleMaker(is_collective=False)}, "parameter-server mode"),
            ({"strategy": {"stage": 2}}, "expected a fleet.DistributedStrategy, got dict"),
            ({"strategy": _strategy({"sharding_degree": 2})}, "does not divide 1 rank"),
        ],
    )
    def test_refuses_before_anything_starts(self, arguments: Any, message: str, inits: list[Any]) -> None:
        with pytest.raises(ConfigError, match=message):
            Session().init(**arguments)
        assert inits == []

    @pytest.mark.usefixtures("static_mode")
    def test_refuses_static_graphs(self, inits: list[Any]) -> None:
        with pytest.raises(ConfigError, match="only dynamic graphs"):
            Session().init()
        assert inits == []

    def test_refuses_another_backend_than_gloo_on_cpu(self, inits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paddle.distributed, "get_world_size", lambda: 2)
        monkeypatch.delenv("PADDLE_DISTRI_BACKEND", raising=False)
        with pytest.raises(ConfigError, match="--backend gloo"):
            Session().init()
        assert inits == []
        monkeypatch.setenv("PADDLE_DISTRI_BACKEND", "gloo")
        Session().init()
        assert len(inits) == 1

    def test_again_takes_the_new_strategy(self, session: Session) -> None:
        model = session.distributed_model(paddle.nn.Linear(2, 2))
        session.init(strategy=_strategy(stage=2, reduce_overlap=True))
        sharded: Any = session.distributed_optimizer(_sgd(model))
        assert sharded.config == ShardingConfig(stage=2, reduce_overlap=True)

    def test_refused_keeps_the_earlier_settings(self, session: Session) -> None:
        with pytest.raises(ConfigError):
            session.init(strategy=_strategy({"mp_degree": 2}))
        model = session.distributed_model(paddle.nn.Linear(2, 2))
        sharded: Any = session.distributed_optimizer(_sgd(model))
        assert sharded.config.stage == 1


class TestDistributedModel:
    def test_returns_the_same_object(self, session: Session) -> None:
        model = paddle.nn.Linear(2, 2)
        keys = list(model.state_dict())
        assert session.distributed_model(model) is model
        assert list(model.state_dict()) == keys

    def test_refuses_the_second_time(self, session: Session) -> None:
        model = session.distributed_model(paddle.nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="this model has been wrapped before"):
            session.distributed_model(model)

    def test_refuses_a_model_with_parameters_of_a_wrapped_one(self, session: Session) -> None:
        shared = paddle.nn.Linear(2, 2)
        first = session.distributed_model(paddle.nn.Sequential(shared, paddle.nn.Linear(2, 1)))
        second = paddle.nn.Sequential(paddle.nn.Linear(2, 2), shared)
        with pytest.raises(ConfigError, match=r"'1\.weight' also belongs to a Sequential"):
            session.distributed_model(second)
        for parameter in shared.parameters():
            parameter.stop_gradient = True
        session.distributed_model(second)
        assert first is not second

    @pytest.mark.parametrize("what", [None, paddle.nn.Linear, [paddle.nn.Linear(1, 1)]])
    def test_refuses_what_is_no_layer(self, what: Any, session: Session) -> None:
        with pytest.raises(ConfigError, match=r"expected a paddle\.nn\.Layer"):
            session.distributed_model(what)

    @pytest.mark.filterwarnings("ignore:The program will return to single-card operation")
    def test_refuses_a_data_parallel_inside(self, session: Session) -> None:
        inner = paddle.DataParallel(paddle.nn.Linear(2, 2))
        for model in (inner, paddle.nn.Sequential(inner)):
            with pytest.raises(ConfigError, match="DataParallel"):
                session.distributed_model(model)

    def test_refuses_a_model_without_values(self, session: Session) -> None:
        with paddle.LazyGuard():
            model = paddle.nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="weight: has no value yet"):
            session.distributed_model(model)

    def test_keeps_no_model_alive(self, session: Session) -> None:
        session.distributed_model(paddle.nn.Linear(2, 2))
        gc.collect()
        assert session._live_models() == []
        assert session._models == []


class TestDistributedOptimizer:
    def test_passes_on_what_init_settled(self, session: Session) -> None:
        model = session.distributed_model(paddle.nn.Linear(2, 2))
        optimizer = _sgd(model)
        sharded: Any = session.distributed_optimizer(optimizer)
        assert sharded.model is model
        assert sharded.optimizer is optimizer
        assert (sharded.config, sharded.lanes) == (ShardingConfig(stage=1), {})

    def test_finds_the_model_that_owns_its_parameters(self, session: Session) -> None:
        generator = session.distributed_model(paddle.nn.Linear(2, 2))
        discriminator = session.distributed_model(paddle.nn.Linear(2, 1))
        for model in (discriminator, generator):
            sharded: Any = session.distributed_optimizer(_sgd(model))
            assert sharded.model is model

    def test_finds_it_for_a_part_of_the_model_and_for_groups(self, session: Session) -> None:
        session.distributed_model(paddle.nn.Linear(2, 2))
        model = session.distributed_model(paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 1)))
        part: Any = session.distributed_optimizer(_sgd(model[1]))
        assert part.model is model
        groups = [{"params": layer.parameters(), "learning_rate": 0.1} for layer in model]
        grouped: Any = session.distributed_optimizer(paddle.optimizer.SGD(parameters=groups))
        assert grouped.model is model

    def test_refuses_parameters_of_no_wrapped_model_or_of_two(self, session: Session) -> None:
        first = session.distributed_model(paddle.nn.Linear(2, 2))
        second = session.distributed_model(paddle.nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="none of its parameters"):
            session.distributed_optimizer(_sgd(paddle.nn.Linear(2, 2)))
        with pytest.raises(ConfigError, match="parameters of 2 wrapped models"):
            session.distributed_optimizer(_sgd(first, second))

    @pytest.mark.parametrize(
        ("own", "reason"),
        [
            ({}, "needs the model: call"),
            ({"reduce_overlap": True}, r"needs the model \(reduce_overlap hook into its layers\)"),
            (
                {"allgather_overlap": True, "reduce_overlap": True},
                r"needs the model \(allgather_overlap and reduce_overlap hook into its layers\)",
            ),
        ],
    )
    def test_needs_distributed_model(self, own: dict[str, Any], reason: str, session: Session) -> None:
        session.init(strategy=_strategy(**own))
        with pytest.raises(ConfigError, match=reason):
            session.distributed_optimizer(_sgd(paddle.nn.Linear(2, 2)))

    def test_refuses_the_second_time(self, session: Session) -> None:
        model = session.distributed_model(paddle.nn.Linear(2, 2))
        optimizer = _sgd(model)
        sharded = session.distributed_optimizer(optimizer)
        for again in (optimizer, sharded):
            with pytest.raises(ConfigError, match="this optimizer has been wrapped before"):
                session.distributed_optimizer(again)

    def test_may_be_tried_again_after_shard_has_refused(
        self, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise ConfigError("refused")

        model = session.distributed_model(paddle.nn.Linear(2, 2))
        optimizer = _sgd(model)
        with monkeypatch.context() as context:
            context.setattr(session_module, "shard_over", refuse)
            with pytest.raises(ConfigError, match="refused"):
                session.distributed_optimizer(optimizer)
        session.distributed_optimizer(optimizer)

    def test_refuses_what_is_no_optimizer(self, session: Session) -> None:
        session.distributed_model(paddle.nn.Linear(2, 2))
        with pytest.raises(ConfigError, match=r"expected a paddle\.optimizer\.Optimizer, got list"):
            session.distributed_optimizer([])

    def test_refuses_other_degrees_than_those_of_init(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        model = session.distributed_model(paddle.nn.Linear(2, 2))
        monkeypatch.setattr(session_module, "resolve_degrees", lambda strategy, world: Degrees(1, 2))
        with pytest.raises(ConfigError, match=r"asks for dp_degree=1, sharding_degree=2, but fleet\.init made"):
            session.distributed_optimizer(_sgd(model), strategy=_strategy())

    def test_takes_a_strategy_of_its_own(self, session: Session) -> None:
        model = session.distributed_model(paddle.nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="does not divide"):
            session.distributed_optimizer(_sgd(model), strategy=_strategy({"sharding_degree": 2}))
        sharded: Any = session.distributed_optimizer(_sgd(model), strategy=_strategy(stage=2, timeline=True))
        assert sharded.config == ShardingConfig(stage=2, timeline=True)
        other: Any = session.distributed_optimizer(_sgd(model))
        assert other.config.stage == 1, "it holds for that optimizer only"


@pytest.mark.filterwarnings("ignore:.*GradScaler")
def test_distributed_scaler_returns_the_same_one(session: Session) -> None:
    scaler = paddle.amp.GradScaler(enable=False)
    assert session.distributed_scaler(scaler) is scaler
    with pytest.raises(ConfigError, match=r"expected a paddle\.amp\.GradScaler, got int"):
        session.distributed_scaler(1)


class TestEverythingElseIsPaddles:
    def test_is_reachable(self) -> None:
        own = {"init", "distributed_model", "distributed_optimizer", "distributed_scaler", "DistributedStrategy"}
        public = {name for name in dir(paddle_fleet) if not name.startswith("_")}
        assert {"worker_index", "HybridCommunicateGroup", "utils", "recompute", "fleet"} <= public
        assert public <= set(dir(fleet))
        for name in public - own:
            assert getattr(fleet, name) is getattr(paddle_fleet, name), name
        for name in own:
            assert getattr(fleet, name) is not getattr(paddle_fleet, name), name

    def test_can_be_imported_by_name(self) -> None:
        from hp_sharding.fleet import worker_num

        assert worker_num is paddle_fleet.worker_num

    def test_a_wrong_name_says_so(self) -> None:
        with pytest.raises(AttributeError, match=r"hp_sharding\.fleet.*'destributed_model'"):
            _ = fleet.destributed_model
