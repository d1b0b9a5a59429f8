"""What a script finds under ``python -m hp_sharding.run``, in one process; and the options of the command."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed.fleet as paddle_fleet
import pytest
from click.testing import CliRunner, Result
from paddle.distributed.fleet.utils import hybrid_parallel_util

from hp_sharding import ConfigError, fleet
from hp_sharding.cli import main
from hp_sharding.fleet import replacing
from hp_sharding.fleet.replacing import paddles_face_replaced
from hp_sharding.fleet.session import Session
from hp_sharding.fleet.strategy import DistributedStrategy
from hp_sharding.run import run

NAMES = ("init", "distributed_model", "distributed_optimizer", "distributed_scaler", "DistributedStrategy")
SCRIPT = """
import json, sys
from paddle.distributed import fleet
from paddle.distributed.fleet import DistributedStrategy
from hp_sharding.fleet import _SESSION
print(json.dumps([sys.argv, sys.path[0], dict(_SESSION.defaults), __name__, DistributedStrategy.__module__]))
"""
Invoke = Callable[..., Result]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.distributed, "get_world_size", lambda: 2)


class TestReplacing:
    def test_paddles_names_are_ours_inside_and_paddles_again_after(self) -> None:
        before = {name: getattr(paddle_fleet, name) for name in NAMES}
        session = Session()
        with paddles_face_replaced(session, {"stage": 3}):
            from paddle.distributed.fleet import DistributedStrategy as Imported

            assert Imported is DistributedStrategy
            for name in NAMES[:-1]:
                assert getattr(paddle_fleet, name) == getattr(session, name)
            assert paddle_fleet.fleet.init == session.init
            assert paddle_fleet.fleet.distributed_optimizer == session.distributed_optimizer
            assert session.defaults == {"stage": 3}
        assert {name: getattr(paddle_fleet, name) for name in NAMES} == before
        assert "init" not in vars(paddle_fleet.fleet)
        assert session.defaults == {}

    def test_a_script_of_paddles_trains_with_these_settings(self) -> None:
        session = Session()
        with paddles_face_replaced(session, {"stage": 1, "timeline": True}):
            strategy = paddle_fleet.DistributedStrategy()
            strategy.hybrid_configs["sharding_configs"].comm_overlap = True
            assert paddle_fleet.init(is_collective=True, strategy=strategy) is paddle_fleet.fleet
            model = paddle_fleet.distributed_model(paddle.nn.Linear(2, 2))
            optimizer = paddle_fleet.distributed_optimizer(paddle.optimizer.SGD(parameters=model.parameters()))
        config = optimizer.config
        assert (config.stage, config.timeline, config.reduce_overlap) == (1, True, True)

    def test_paddles_face_is_back_after_an_exception(self) -> None:
        before = paddle_fleet.init
        with pytest.raises(ZeroDivisionError), paddles_face_replaced(Session(), {}):
            _ = 1 / 0
        assert paddle_fleet.init is before

    def test_bad_settings_replace_nothing(self) -> None:
        before = paddle_fleet.init
        with pytest.raises(ConfigError, match="stage=7"), paddles_face_replaced(Session(), {"stage": 7}):
            pass
        assert paddle_fleet.init is before

    @pytest.mark.usefixtures("two_ranks")
    @pytest.mark.parametrize("refused", replacing._REFUSED, ids=lambda refused: f"{refused.module}.{refused.name}")
    def test_what_has_no_counterpart_says_so(self, refused: Any) -> None:
        module = importlib.import_module(refused.module)
        kind = getattr(module, refused.name)
        with paddles_face_replaced(Session(), {}):
            thing = getattr(module, refused.name)
            assert not isinstance(kind, type) or thing is kind, "isinstance goes on working"
            with pytest.raises(ConfigError, match=f"{refused.name}: hp_sharding has no counterpart"):
                thing(paddle.nn.Linear(1, 1))
        assert getattr(module, refused.name) is kind

    @pytest.mark.filterwarnings("ignore:The program will return to single-card operation")
    def test_one_process_may_have_a_data_parallel(self) -> None:
        with paddles_face_replaced(Session(), {}):
            assert isinstance(paddle.DataParallel(paddle.nn.Linear(1, 1)), paddle.DataParallel)

    def test_a_script_reduces_gradients_itself_only_where_nobody_else_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[Any] = []
        monkeypatch.setattr(hybrid_parallel_util, "fused_allreduce_gradients", lambda *given: calls.append(given))
        session = Session()
        with paddles_face_replaced(session, {}):
            session.init()
            model = session.distributed_model(paddle.nn.Linear(1, 1))
            others = paddle.nn.Linear(1, 1).parameters()
            hybrid_parallel_util.fused_allreduce_gradients(model.parameters(), None)
            assert calls == []
            hybrid_parallel_util.fused_allreduce_gradients(iter(others), None)
        assert [[id(param) for param in params] for params, _ in calls] == [[id(param) for param in others]]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs the command on a script that prints what it finds; ``script`` stands for its path."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("HP_SHARDING_CONFIGS", raising=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, command: Any = run, **environment: str) -> Result:
        return CliRunner(env=environment).invoke(command, list(arguments))

    return call


def _found(result: Result) -> list[Any]:
    assert result.exit_code == 0, (result.output, result.exception)
    found: list[Any] = json.loads(result.output.strip().splitlines()[-1])
    return found


class TestCommand:
    def test_everything_behind_the_script_is_the_scripts(self, invoke: Invoke, tmp_path: Path) -> None:
        argv, path, settings, name, strategy = _found(invoke("--stage", "3", "script.py", "--stage", "9", "-m", "x"))
        assert argv == ["script.py", "--stage", "9", "-m", "x"]
        assert path == str(tmp_path)
        assert settings == {"stage": 3}
        assert (name, strategy) == ("__main__", "hp_sharding.fleet.strategy")
        assert fleet._SESSION.defaults == {}

    def test_a_module_is_found_from_here(self, invoke: Invoke, tmp_path: Path) -> None:
        argv, path, *_ = _found(invoke("-m", "script", "--epochs", "3"))
        assert Path(argv[0]).name == "script.py" and argv[1:] == ["--epochs", "3"]
        assert path == str(tmp_path)

    def test_is_a_command_of_the_package_too(self, invoke: Invoke) -> None:
        assert _found(invoke("run", "--stage", "1", "script.py", command=main))[2] == {"stage": 1}

    def test_each_key_is_of_its_type(self, invoke: Invoke) -> None:
        options = ["--reduce-overlap", "--no-comm-fusion", "--comm-buffer-size-mb", "0.5", "--gradient-scale", "sum"]
        more = ["--reshard-after-step", "True", "--prefetch-depth", "2", "--gather-dtype", "bfloat16"]
        assert _found(invoke(*options, *more, "script.py"))[2] == {
            "reduce_overlap": True,
            "comm_fusion": False,
            "comm_buffer_size_MB": 0.5,
            "gradient_scale": "sum",
            "reshard_after_step": True,
            "prefetch_depth": 2,
            "gather_dtype": "bfloat16",
        }

    def test_the_environment_counts_less_than_options(self, invoke: Invoke) -> None:
        environment = {"HP_SHARDING_CONFIGS": '{"stage": 1, "timeline": true}'}
        assert _found(invoke("--stage", "2", "script.py", **environment))[2] == {"stage": 2, "timeline": True}

    @pytest.mark.parametrize(
        ("arguments", "environment", "message"),
        [
            (["--stage", "7", "script.py"], "", "stage=7"),
            (["script.py"], '{"stages": 2}', "did you mean 'stage'"),
            (["script.py"], "{stage: 2}", "HP_SHARDING_CONFIGS is no JSON"),
            (["script.py"], "[2]", "must be a JSON object"),
            (["nowhere.py"], "", "there is no file nowhere.py"),
            ([], "", "Missing argument 'SCRIPT'"),
        ],
    )
    def test_wrong_use_is_said(self, arguments: list[str], environment: str, message: str, invoke: Invoke) -> None:
        result = invoke(*arguments, HP_SHARDING_CONFIGS=environment)
        assert result.exit_code == 2
        assert message in result.output

    def test_what_ends_a_script_ends_it(self, invoke: Invoke, tmp_path: Path) -> None:
        (tmp_path / "exits.py").write_text("import sys; sys.exit(5)")
        (tmp_path / "reads.py").write_text("raise EOFError('no more input')")
        (tmp_path / "fails.py").write_text("raise ValueError('bad')")
        assert invoke("exits.py").exit_code == 5
        reads = invoke("reads.py")
        assert (reads.exit_code, "no more input" in reads.stderr) == (1, True)
        assert isinstance(invoke("fails.py").exception, ValueError)
