"""Jobs whose LoRAs are still loading: they start, get them at the step at which these come, and wait after their free
steps."""

from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from helpers.edits import apart, make_edit, run
from helpers.loras import applied, save_lora

from instgenie.adapters.registry import LoraRegistry
from instgenie.cluster.config import LoraConfig
from instgenie.cluster.wire import LorasKept
from instgenie.engine.loop import Engine
from instgenie.engine.own import reuse_own
from instgenie.engine.prepare import prepare
from instgenie.errors import LoraError
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import LoraUse
from instgenie.workers.lora_desk import LoraDesk, LoraWait


class FakeLine:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.num_wakes = 0

    def send(self, message: Any, frames: Any = ()) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        self.num_wakes += 1


@dataclass(eq=False)
class User:
    job: Job
    loras: LoraWait | None = None


class Slow:
    """A desk whose reads wait for a sign."""

    def __init__(self, model: Model, config: LoraConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.line, self.go = FakeLine(), Event()
        self.desk = LoraDesk(model, config, self.line)  # type: ignore[arg-type]
        read = self.desk.tiers._read

        def slow(use: LoraUse) -> Any:
            assert self.go.wait(60)
            return read(use)

        monkeypatch.setattr(self.desk.tiers, "_read", slow)

    def step(self, engine: Engine, users: list[User]) -> None:
        assert list(self.desk.settle(users)) == []
        if engine.pick():
            engine.step()

    def arrive(self, user: User) -> None:
        self.go.set()
        assert user.loras
        user.loras.fetch.result()


@pytest.fixture
def path(models: dict[str, Model], tmp_path: Path) -> Path:
    return save_lora(tmp_path / "a.safetensors", models["sd"], seed=1)


def make_job(model: Model, path: Path, **fields: Any) -> Job:
    [use] = LoraRegistry({"a": str(path)}).resolve([LoraUse("a", 0.7)], "")
    return prepare(replace(make_edit(steps=6, **fields), loras=(use,)), model)


def test_a_job_starts_without_and_goes_on_with_its_lora(
    models: dict[str, Model], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["sd"]
    slow, engine = Slow(model, LoraConfig(wait_share=0.5), monkeypatch), Engine(model)
    user = User(make_job(model, path))
    slow.desk.begin(user)
    engine.join(user.job)
    slow.step(engine, [user])
    slow.step(engine, [user])
    assert (user.job.step, user.job.loras) == (2, None)
    slow.arrive(user)
    late = replace(user.job, loras=applied(model, (path, 0.7)))
    while engine.jobs:
        slow.step(engine, [user])
    assert user.loras
    assert (user.loras.facts.step, user.loras.facts.tier, user.loras.facts.waited_seconds) == (2, "disk", 0.0)
    assert apart(user.job.latents, run(model, [late])[0]) < 1e-4
    [told] = [message for message in slow.line.sent if isinstance(message, LorasKept)]
    assert told.num_bytes["host"] > 0
    assert [tier for tier, _, _ in told.loads] == ["disk"]
    assert slow.line.num_wakes == 1
    slow.desk.release(user)
    assert not slow.desk.tiers.pins
    again = User(make_job(model, path))  # it is in memory now, so that it is there from the first step
    slow.desk.begin(again)
    assert list(slow.desk.settle([again])) == []
    assert again.loras
    assert (again.loras.facts.step, again.loras.facts.tier) == (0, "host")


def test_after_its_free_steps_a_job_waits_and_others_go_on(
    models: dict[str, Model], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["sd"]
    slow, engine = Slow(model, LoraConfig(wait_share=0.3), monkeypatch), Engine(model)
    user, other = User(make_job(model, path)), User(prepare(make_edit(steps=6), model))
    for one in (user, other):
        slow.desk.begin(one)
        engine.join(one.job)
    for _ in range(4):
        slow.step(engine, [user, other])
    assert (user.job.step, other.job.step) == (1, 4)  # at most 0.3 * 6 steps, then it stands still
    assert user.job.is_held
    assert engine.pick() == [other.job]
    assert other.loras is None
    slow.arrive(user)
    slow.step(engine, [user, other])
    assert not user.job.is_held
    assert user.loras
    assert user.loras.facts.step == 1
    assert user.loras.facts.waited_seconds > 0
    while engine.jobs:
        slow.step(engine, [user, other])
    assert user.job.done
    assert other.job.done


def test_no_edit_ends_without_its_lora() -> None:
    for config in (LoraConfig(), LoraConfig(wait_share=1.0), LoraConfig(wait_steps=1000)):
        free = [config.num_free_steps(num_steps) for num_steps in range(1, 101)]
        assert all(0 <= num < num_steps for num_steps, num in enumerate(free, 1))
    assert LoraConfig().num_free_steps(28) == 8  # at most 30 %
    assert LoraConfig(wait_steps=3).num_free_steps(28) == 3


def test_no_free_steps_means_the_edit_waits_at_once(
    models: dict[str, Model], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["sd"]
    slow, engine = Slow(model, LoraConfig(wait_share=0.0, wait_steps=0), monkeypatch), Engine(model)
    user = User(make_job(model, path))
    slow.desk.begin(user)
    engine.join(user.job)
    slow.step(engine, [user])
    assert (user.job.step, user.job.is_held) == (0, True)
    slow.arrive(user)
    while engine.jobs:
        slow.step(engine, [user])
    whole = replace(make_job(model, path), loras=applied(model, (path, 0.7)))
    assert apart(user.job.latents, run(model, [whole])[0]) < 1e-4


def test_what_an_edit_kept_without_its_lora_is_computed_again(
    models: dict[str, Model], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["sd"]
    slow, engine = Slow(model, LoraConfig(wait_share=0.5), monkeypatch), Engine(model)
    user = User(reuse_own(make_job(model, path, own_steps=(0,))))
    slow.desk.begin(user)
    engine.join(user.job)
    slow.step(engine, [user])
    slow.step(engine, [user])
    assert (user.job.step, user.job.in_dense_steps) == (2, False)
    slow.arrive(user)
    assert list(slow.desk.settle([user])) == []
    assert user.job.in_dense_steps
    assert user.job.own_steps
    assert user.job.own_steps.steps == (0, 2)


def test_a_lora_that_cannot_be_loaded_fails_its_job_alone(models: dict[str, Model], path: Path) -> None:
    model, line = models["sd"], FakeLine()
    desk = LoraDesk(model, LoraConfig(), line)  # type: ignore[arg-type]
    user, other = User(make_job(model, path)), User(prepare(make_edit(steps=2), model))
    path.write_bytes(path.read_bytes()[:-5])
    desk.begin(user)
    assert user.loras
    with pytest.raises(LoraError):
        user.loras.fetch.result()
    [(failed, error)] = desk.settle([user, other])
    assert failed is user
    assert "truncated" in str(error)
    desk.release(user)
    assert not desk.tiers.pins


def test_a_lora_without_memory_fails_its_job_alone(
    models: dict[str, Model], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong in the thread that loads, the step loop goes on."""
    model, line = models["sd"], FakeLine()
    desk = LoraDesk(model, LoraConfig(), line)  # type: ignore[arg-type]

    def fail(use: LoraUse) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(desk.tiers, "_read", fail)
    user = User(make_job(model, path))
    desk.begin(user)
    assert user.loras
    with pytest.raises(MemoryError):
        user.loras.fetch.result()
    [(failed, error)] = desk.settle([user])
    assert failed is user
    assert isinstance(error, MemoryError)
