"""The machine card: limits read from planted files, the cache's rules, rates that are the best of several kernels."""

import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta

import pytest
import torch

from flashstudy.facts.units import GIB, MIB
from flashstudy.measure import ceilings, cgroups, host, machine, rates
from flashstudy.measure.blocks import Stopwatch
from flashstudy.measure.contention import Reading, Watch


@pytest.fixture
def card():
    def by_threads(one, two):
        return {"1": one, "2": two}

    return machine.MachineCard(
        cpu_model="Test CPU", arch="x86_64", simd=["avx2", "avx512_vnni"], physical_cores=2, usable_cpus=2,
        cpu_quota=1.5, numa_nodes=1, memory_limit_bytes=8 * GIB, llc_bytes=32 * MIB, n_threads=2,
        thread_reason="2 physical cores",
        read_bytes_per_s=by_threads(20e9, 30e9), copy_bytes_per_s=by_threads(15e9, 25e9),
        triad_bytes_per_s=by_threads(16e9, 26e9), read_kernel=by_threads("torch.mv", "torch.sum"),
        bandwidth_by_size=[
            dict(working_set_bytes=MIB, n_threads=1, read_bytes_per_s=60e9),
            dict(working_set_bytes=128 * MIB, n_threads=1, read_bytes_per_s=20e9),
        ],
        gemm_flop_per_s={"fp32": 8e10, "bf16": 4e11, "int8": 8e11},
        gemm_one_thread_flop_per_s={"fp32": 5e10, "bf16": 3e11},
        gemm_kernel={"fp32": "linear"}, fast_bf16=True,
        dequantize_weights_per_s={"4": 3e8}, decompress_weights_per_s={"4": 2e8},
        standard_dtype="bfloat16", gpu=None, fingerprint="0123456789ab", torch_version="2.13.0",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"), measured_in_s=8.0, contended=False,
    )  # fmt: skip


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    machine._load.cache_clear()
    yield tmp_path / "cache"
    machine._load.cache_clear()


def planted(monkeypatch, card):
    """`machine.card` with a measurement that counts its calls and returns this card."""
    calls = []
    monkeypatch.setattr(machine, "measure", lambda host: calls.append(host) or card)
    return calls


def test_card_survives_json(card):
    assert machine.MachineCard.from_json(card.to_json()) == card
    with pytest.raises(ValueError, match="not a machine card"):
        machine.MachineCard.from_json(json.dumps({"cpu_model": "x"}))


def test_card_is_measured_once_and_kept(monkeypatch, cache, card):
    calls = planted(monkeypatch, card)
    assert machine.card() == machine.card() == card
    machine._load.cache_clear()  # as a new process
    assert machine.card() == card
    assert len(calls) == 1
    machine.card(refresh=True)
    assert len(calls) == 2


def test_whether_a_card_is_kept_can_be_asked_without_measuring(monkeypatch, cache, card):
    calls = planted(monkeypatch, card)
    assert not machine.is_kept() and not calls
    machine.card()
    assert machine.is_kept() and len(calls) == 1


def test_contended_card_is_measured_again_once_it_is_old(monkeypatch, cache, card):
    young = dataclasses.replace(card, contended=True)
    calls = planted(monkeypatch, young)
    machine.card()
    machine._load.cache_clear()
    assert machine.card().contended and len(calls) == 1
    old = (datetime.now(UTC) - timedelta(hours=1)).isoformat(timespec="seconds")
    next(cache.glob("*.json")).write_text(dataclasses.replace(young, measured_at=old).to_json())
    machine._load.cache_clear()
    machine.card()
    assert len(calls) == 2


def test_old_calm_card_is_kept_and_a_broken_one_is_replaced(monkeypatch, cache, card):
    old = (datetime.now(UTC) - timedelta(days=90)).isoformat(timespec="seconds")
    calls = planted(monkeypatch, dataclasses.replace(card, measured_at=old))
    machine.card()
    machine._load.cache_clear()
    machine.card()
    assert len(calls) == 1
    next(cache.glob("*.json")).write_text("{}")
    machine._load.cache_clear()
    machine.card()
    assert len(calls) == 2


def test_fingerprint_changes_with_the_quota_and_nothing_else(monkeypatch):
    here = host.read()
    assert machine.fingerprint(here) == machine.fingerprint(host.read())
    assert machine.fingerprint(dataclasses.replace(here, cpu_quota=0.5)) != machine.fingerprint(here)


def test_hardware_record_takes_the_rates_of_the_asked_threads(card):
    both, one = machine.as_hardware(card), machine.as_hardware(card, n_threads=1)
    assert (both.bytes_per_s, both.rate("fp32")) == (30e9, 8e10)
    assert (one.bytes_per_s, one.rate("fp32")) == (20e9, 5e10)
    assert both.dequantize_weights_per_s == {4: 3e8} and both.measured and both.kind == "cpu"
    assert both.accelerates("int8") and not both.accelerates("fp8")
    with pytest.raises(ValueError, match="no rates for 7 threads; measured are 1, 2"):
        machine.as_hardware(card, n_threads=7)


def test_text_shows_units_reasons_and_contention(card):
    text = machine.render(card)
    assert "read 30.0 GB/s (torch.sum)" in text
    assert "quota of 1.5 CPUs" in text and "last-level cache 32 MiB" in text
    assert "bf16 is fast, standard is bfloat16" in text
    assert "read in 1 MiB" in text and "60.0 GB/s with 1" in text
    assert "other work ran" not in text
    assert "other work ran" in machine.render(dataclasses.replace(card, contended=True))


def test_threads_are_bounded_by_cores_and_by_the_quota():
    here = dataclasses.replace(host.read(), usable_cores=8, cpu_quota=None)
    assert host.choose_threads(here)[0] == 8
    threads, reason = host.choose_threads(dataclasses.replace(here, cpu_quota=2.5))
    assert threads == 2 and "quota of 2.5 CPUs" in reason
    assert host.choose_threads(dataclasses.replace(here, cpu_quota=0.5))[0] == 1


def test_host_facts_agree_with_each_other():
    here = host.read()
    assert 1 <= here.usable_cores <= here.usable_cpus
    assert here.llc_bytes >= MIB // 4
    assert here.memory_limit_bytes > 256 * MIB


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_2_limits_are_the_tightest_on_the_way_up(tmp_path):
    mount, membership = tmp_path / "cgroup", tmp_path / "self"
    write(mount, cgroup__controllers="cpu memory")
    write(mount / "pod", cpu__max="150000 100000", memory__max=str(4 * GIB), memory__current=str(3 * GIB))
    write(
        mount / "pod/job",
        cpu__max="max 100000",
        memory__max=str(8 * GIB),
        memory__current=str(GIB),
        memory__stat="inactive_file 0",
    )
    membership.write_text("0::/pod/job\n")
    assert cgroups.limits(mount, membership) == cgroups.Limits(1.5, 4 * GIB, 3 * GIB)


def test_version_1_limits_and_droppable_pages(tmp_path):
    mount, membership = tmp_path / "cgroup", tmp_path / "self"
    write(mount / "cpu/job", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    write(
        mount / "memory/job",
        memory__limit_in_bytes=str(2 * GIB),
        memory__usage_in_bytes=str(GIB),
        memory__stat=f"cache 1\ntotal_inactive_file {256 * MIB}\n",
    )
    membership.write_text("4:memory:/job\n1:cpu,cpuacct:/job\n")
    assert cgroups.limits(mount, membership) == cgroups.Limits(0.5, 2 * GIB, GIB - 256 * MIB)


def test_no_limits_without_control_groups_or_with_unlimited_ones(tmp_path):
    assert cgroups.limits(tmp_path / "none", tmp_path / "none") == cgroups.Limits(None, None, None)
    write(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5")
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cgroups.limits(tmp_path, tmp_path / "none") == cgroups.Limits(None, None, None)


class Still(Watch):
    """A clock moved by kernels, and accounts that show a wait when told to."""

    def __init__(self):
        super().__init__()
        self.now_s, self.delay_s = 0.0, 0.0

    def __call__(self):
        return self.now_s

    def refresh(self):
        pass

    def read(self):
        return Reading(self.now_s, {1: self.delay_s}, 0, 0, 0)

    def kernel(self, *seconds, waits_s=0.0):
        calls = iter([*seconds, *[seconds[-1]] * 100_000])

        def call():
            self.now_s += next(calls)
            self.delay_s += waits_s

        return call


def test_ceiling_is_the_best_try_of_the_best_kernel():
    still = Still()

    def missing():
        raise NotImplementedError

    fast = still.kernel(0.03, 0.02, 0.01, 0.02, 0.03)  # the first call warms up and does not count
    kernels = {"slow": still.kernel(0.04), "fast": fast, "missing": missing}
    rate = rates.best_rate(kernels, 1.0, Stopwatch(clock=still, watch=still), tries=3)
    assert (rate.kernel, rate.contended) == ("fast", False)
    assert rate.per_s == pytest.approx(100.0)


def test_rate_whose_every_try_was_disturbed_is_contended():
    still = Still()
    rate = rates.best_rate({"a": still.kernel(0.01, waits_s=0.01)}, 1.0, Stopwatch(clock=still, watch=still))
    assert rate.contended
    with pytest.raises(RuntimeError, match="none of the kernels"):
        rates.best_rate({}, 1.0, Stopwatch(clock=still, watch=still))


def test_streaming_set_is_four_caches():
    assert ceilings.stream_bytes(32 * MIB) == 128 * MIB
    assert ceilings.stream_bytes(64 * MIB) == 256 * MIB


def test_ceiling_from_memory_ignores_cached_sizes_and_never_falls_with_threads():
    def row(size, threads, read):
        return dict(
            working_set_bytes=size, n_threads=threads, read_bytes_per_s=read, copy_bytes_per_s=read / 2,
            triad_bytes_per_s=read, read_kernel=f"{threads}",
        )  # fmt: skip

    rows = [row(MIB, 1, 90.0), row(128 * MIB, 1, 20.0), row(MIB, 2, 180.0), row(128 * MIB, 2, 15.0)]
    assert ceilings._streamed(rows, 1, 32 * MIB)["read_bytes_per_s"] == 20.0
    assert ceilings._streamed(rows, 2, 32 * MIB)["read_bytes_per_s"] == 20.0


def test_real_rates_are_finite_and_sparse_is_slower_than_dense_conversion():
    stopwatch = Stopwatch()
    read = rates.read_rate(MIB, stopwatch)
    widen = rates.dequantize_rate(stopwatch, torch.float32, side=512)
    unpack = rates.decompress_rate(stopwatch, side=512)
    product = rates.gemm_rate("fp32", 16, 256, stopwatch)
    stopwatch.watch.close()
    assert all(1e6 < rate.per_s < 1e15 and math.isfinite(rate.per_s) for rate in (read, widen, unpack, product))
    assert unpack.per_s < widen.per_s
