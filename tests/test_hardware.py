import dataclasses

import pytest

from flashstudy.facts import hardware
from flashstudy.facts.units import GIB, GIGA, TERA

DEVICES = hardware.load()


def test_an_a100_turns_compute_bound_at_153_flop_per_byte():
    a100 = DEVICES["A100-80"]
    assert a100.ridge_flop_per_byte("bf16") == pytest.approx(312e12 / 2039e9)  # 153.0
    assert a100.memory_bytes == 80 * GIB
    assert a100.interconnect_bytes_per_s == 300 * GIGA  # NVLink's 600 GB/s count both directions


def test_peaks_are_dense_not_sparse():
    assert DEVICES["H100"].rate("bf16") == 989 * TERA  # 1979 is the sparse figure
    assert DEVICES["L4"].rate("int8") == 242.5 * TERA  # 485 is the sparse figure


def test_volta_has_int8_instructions_but_does_not_accelerate_int8():
    v100 = DEVICES["V100"]
    assert v100.rate("int8") == 62.8 * TERA
    assert not v100.accelerates("int8")
    assert v100.not_accelerated == ("bf16", "int8", "fp8", "int4")


def test_a_format_without_units_runs_in_a_wider_one():
    assert DEVICES["A100-80"].rate("fp8") == 312 * TERA  # in bf16
    assert DEVICES["T4"].rate("bf16") == DEVICES["T4"].rate("fp32")  # Turing has no bf16
    assert DEVICES["H100"].rate("int4") == 989 * TERA  # widened to bf16, not to int8


def test_fp4_units_are_not_counted_as_int4():
    assert not DEVICES["B200"].accelerates("int4")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_device_is_within_physical_bounds(device):
    assert 10 * GIGA <= device.bytes_per_s <= 10 * TERA
    assert 10 * GIB <= device.memory_bytes <= 1024 * GIB
    assert device.rate("int8") <= 8 * device.rate("bf16") or not device.accelerates("bf16")
    assert device.source


def test_fifteen_devices_and_more_have_their_cells_sourced():
    assert sum("read:" in device.source for device in DEVICES.values()) >= 15


def test_bad_records_are_refused():
    a100 = DEVICES["A100-80"]
    with pytest.raises(ValueError, match="kind 'tpu'"):
        dataclasses.replace(a100, kind="tpu")
    with pytest.raises(ValueError, match=r"unknown formats \['int7'\]"):
        dataclasses.replace(a100, flop_per_s={"fp32": 1.0, "int7": 2.0})
    with pytest.raises(ValueError, match="needs a positive bandwidth"):
        dataclasses.replace(a100, bytes_per_s=0.0)
    with pytest.raises(ValueError, match="no rate for format 'fp64'"):
        a100.rate("fp64")


def test_conversion_rates_lie_on_a_line_of_logarithms_between_the_measured_sizes():
    cpu = dataclasses.replace(DEVICES["Ryzen3700X"], dequantize_weights_per_s={10**4: 4e9, 10**8: 1e9})
    assert cpu.conversion_rate("dequantize", 10**4) == 4e9
    assert cpu.conversion_rate("dequantize", 10**6) == pytest.approx(2e9)  # halfway: the geometric mean
    assert cpu.conversion_rate("dequantize", 1) == 4e9 and cpu.conversion_rate("dequantize", 10**9) == 1e9
    assert cpu.conversion_rate("decompress", 10**6) is None
    with pytest.raises(KeyError):
        cpu.conversion_rate("compress", 1)
