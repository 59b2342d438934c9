"""Model FLOP utilisation, peak memory and form of rows: counted by the trainer, recorded as metrics."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry

from learner.data.microbatch import Form
from learner.data.rows import Batch
from learner.metrics import LearnerMetrics
from learner.observability.timing import StepTimes, Stopwatch, peak_memory_bytes, utilisation
from learner.policy.policy import Policy, peak_flops, peak_of
from learner.process.recorder import Update, record_step, step_line
from learner.training.trainer import Trainer
from pipeline.config.learner import LoraConfig


class Device:
    """A clock whose events are those of a GPU: read only behind a wait for the device."""

    def __init__(self):
        self.now, self.waits = 0.0, 0

    def event(self):
        device, at = self, self.now

        class Event:
            def elapsed_time(self, end):
                return 1000 * (end.at - at)

            def synchronize(self):
                device.waits += 1

        event = Event()
        event.at = at
        return event


def test_each_second_of_the_device_has_one_phase_and_only_reading_them_waits():
    device = Device()
    watch = Stopwatch(torch.device("cpu"), device.event)
    for _ in range(2):
        with watch.phase("forward"):
            device.now += 1
            with watch.phase("prepare"):
                device.now += 2
            device.now += 4
        device.now += 8
        with watch.phase("backward"):
            device.now += 16
    assert device.waits == 0
    assert watch.seconds == {"prepare": 4.0, "choose": 0.0, "forward": 10.0, "backward": 32.0, "optimize": 0.0}
    with watch.phase("forward"):
        device.now += 1
    assert watch.seconds["forward"] == 11.0 and device.waits == 2


@pytest.mark.parametrize("recorded", [0, 1])
def test_an_update_reads_the_device_once_behind_its_last_backward_pass(recorded, kit, monkeypatch):
    _, batch = trainer_with(kit)
    options = {"tokens_per_microbatch": 16}
    config = kit.run_config(options, replay={"keep_trained": recorded})
    trainer = Trainer(kit.tiny_policy(**options), config)
    order = []
    for name in ("tolist", "cpu", "item", "__float__", "__bool__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda t, *a, real=real, name=name: (order.append(name), real(t, *a))[1]
        )
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda t: (order.append("backward"), backward(t))[1])
    report = trainer.step(batch, 0)
    assert report.n_microbatches > 1
    assert order[: report.n_microbatches] == ["backward"] * report.n_microbatches
    reads = ["cpu", "tolist", *["tolist"] * recorded]
    assert order[report.n_microbatches :] == reads, "what is recorded of the weights is read after the optimizer step"


def trainer_with(kit, advantages=(1.0, -1.0, 0.5), **options):
    trainer = Trainer(kit.tiny_policy(**options), kit.run_config(options))
    return trainer, Batch(0, (), kit.make_rows(3, advantages=advantages))


def trained(kit, watch=None, **options):
    trainer, batch = trainer_with(kit, **options)
    watch = watch or Stopwatch(torch.device("cpu"))
    return trainer, trainer.step(batch, 0, watch=watch), watch.operations


def by_hand(kit, packing):
    """Of the tiny model's forward pass: 16 hidden, 32 inner, 2 layers, 2 heads of 8, 1 key head, vocabulary 23."""
    layer = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 32
    total = 0
    for row in kit.make_rows(3, advantages=(1.0, -1.0, 0.5)):
        n = len(row) - (packing == "packed")
        total += 2 * 2 * layer * n + 4 * 2 * 16 * n * (n + 1) // 2 + 2 * 16 * 23 * row.n_sampled
    return total


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("budget", [16, 4096])
def test_a_step_counts_forward_and_backward_passes_and_no_padding(kit, packing, budget):
    _, _, operations = trained(kit, packing=packing, tokens_per_microbatch=budget)
    assert operations == 3 * by_hand(kit, packing)


def test_rows_without_signal_have_no_backward_pass_and_a_scoring_pass_counts_once(kit):
    _, _, operations = trained(kit, packing="padded", advantages=(0.0, 0.0, 0.0))
    assert operations == by_hand(kit, "padded")
    trainer, batch = trainer_with(kit, packing="padded")
    watch = Stopwatch(torch.device("cpu"))
    trainer.score(batch.rows, watch)
    assert watch.operations == by_hand(kit, "padded")


def test_frozen_weights_under_adapters_have_half_a_backward_pass(kit):
    policy = Policy(kit.tiny_model(), kit.learner_config(lora=LoraConfig(rank=2)), torch.device("cpu"))
    assert policy.form.cost.learning == 2 and kit.tiny_policy().form.cost.learning == 3


def test_utilisation_is_that_of_all_ranks_chips_and_none_without_a_known_peak(kit):
    device = Device()
    watch = Stopwatch(torch.device("cpu"), device.event)
    for phase, seconds in (("forward", 1.0), ("prepare", 7.0), ("backward", 2.0), ("optimize", 1.0)):
        with watch.phase(phase):
            device.now += seconds
    watch.operations = 8e9
    assert utilisation(watch, 2, 2e9) == 0.5
    assert utilisation(watch, 2, None) is None and utilisation(Stopwatch(torch.device("cpu")), 1, 1e9) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    assert trained(kit)[1].mfu is None


def test_utilisation_memory_and_form_reach_metrics_and_the_line(kit):
    _, report, _ = trained(kit, packing="padded")
    assert report.form.padded_because == "configured" and report.peak_memory_bytes > 1 << 20
    registry = CollectorRegistry()
    update = Update(Batch(0, (), ()), replace(report, mfu=0.25), StepTimes(0.0, 0.0, 1.0))
    record_step(LearnerMetrics(registry), update)
    value = registry.get_sample_value
    assert value("afterplay_learner_mfu_ratio") == 0.25
    assert value("afterplay_learner_peak_memory_bytes") == report.peak_memory_bytes
    padded = {reason: value("afterplay_learner_padded_rows", {"reason": reason}) for reason in ("configured", "trial")}
    assert padded == {"configured": 1.0, "trial": 0.0}
    line = step_line(update)
    assert line["mfu"] == 0.25 and line["rows_form"] == "padded" and line["rows_padded"]["configured"] == 1
    assert [Form(packed=True).name, Form(packed=True, shared_min=4).name] == ["packed", "shared"]


@pytest.mark.parametrize("platform, unit", [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_a_process_is_in_bytes_on_every_system(monkeypatch, platform, unit):
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3))
    monkeypatch.setattr("sys.platform", platform)
    assert peak_memory_bytes(torch.device("cpu")) == 3 * unit


@pytest.mark.parametrize(
    "chip, teraflops",
    [("A10G", 70), ("A10", 125), ("A100", 312), ("L4", 121), ("L40", 181), ("L40S", 362), ("H20", 148)],
)
def test_a_chip_is_not_taken_for_one_whose_name_begins_alike(chip, teraflops):
    assert peak_of(f"NVIDIA {chip}") == 1e12 * teraflops
