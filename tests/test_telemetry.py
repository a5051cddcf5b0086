# SPDX-License-Identifier: Apache-2.0
"""Telemetry from folders laid out as boards are: Raspberry Pi 4 and 5, RK3588, Jetson Orin, a PC, and one that says nothing."""
from __future__ import annotations

import json
import os

import pytest
from machine import lay_out

from kestrel import telemetry

pytestmark = pytest.mark.native_only


def policy(number, cpus, governor, now, limit, most):
    folder = f"sys/devices/system/cpu/cpufreq/policy{number}"
    return {f"{folder}/related_cpus": cpus, f"{folder}/scaling_governor": governor, f"{folder}/scaling_cur_freq": now, f"{folder}/scaling_max_freq": limit,
            f"{folder}/cpuinfo_max_freq": most}


def zones(*pairs):
    return {f"sys/class/thermal/thermal_zone{i}/{name}": value for i, pair in enumerate(pairs) for name, value in zip(("type", "temp"), pair)}


COMMON = {"proc/sys/kernel/osrelease": "6.6.31", "proc/loadavg": "0.50 0.40 0.30 1/200 999",
          "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\nSwapTotal: 102400 kB\nSwapFree: 102400 kB",
          "proc/vmstat": "pgfault 5\npgmajfault 7\npswpin 10\npswpout 20", "proc/self/status": "Name:\tx\nVmSwap:\t       0 kB"}
PI4 = {**COMMON, "proc/device-tree/model": b"Raspberry Pi 4 Model B Rev 1.4\0", **policy(0, "0 1 2 3", "ondemand", 1500000, 1500000, 1500000),
       **zones(("cpu-thermal", 61835)), "sys/devices/platform/soc/soc:firmware/get_throttled": "50005",
       "sys/class/thermal/cooling_device0/type": "gpio-fan", "sys/class/thermal/cooling_device0/cur_state": 1,
       "sys/class/hwmon/hwmon1/name": "rpi_volt", "sys/class/hwmon/hwmon1/in0_lcrit_alarm": 1}
PI5 = {**COMMON, "proc/device-tree/model": b"Raspberry Pi 5 Model B Rev 1.0\0", **policy(0, "0 1 2 3", "performance", 2400000, 2400000, 2400000),
       **zones(("cpu-thermal", 48500)), "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled": "0",
       "sys/class/hwmon/hwmon2/name": "rpi_volt", "sys/class/hwmon/hwmon2/in0_lcrit_alarm": 0}
RK3588 = {**COMMON, "proc/device-tree/model": b"Orange Pi 5 Plus\0", **policy(0, "0 1 2 3", "schedutil", 1800000, 1800000, 1800000),
          **policy(4, "4 5", "performance", 2256000, 2256000, 2400000), **policy(6, "6 7", "performance", 2304000, 2304000, 2304000),
          **zones(("soc-thermal", 55000), ("bigcore0-thermal", 57000), ("bigcore1-thermal", 58000), ("littlecore-thermal", 54000)),
          "sys/class/thermal/cooling_device0/type": "thermal-cpufreq-0", "sys/class/thermal/cooling_device0/cur_state": 0,
          "sys/class/thermal/cooling_device1/type": "thermal-cpufreq-1", "sys/class/thermal/cooling_device1/cur_state": 2,
          "sys/class/devfreq/fb000000.gpu/governor": "simple_ondemand", "sys/class/devfreq/fb000000.gpu/cur_freq": 300000000,
          "sys/class/devfreq/dmc/governor": "dmc_ondemand", "sys/class/devfreq/dmc/cur_freq": 528000000, "sys/class/devfreq/dmc/max_freq": 2112000000}
ORIN = {**COMMON, "proc/device-tree/model": b"NVIDIA Jetson Orin Nano Developer Kit\0", **policy(0, "0 1 2 3", "schedutil", 1510400, 1510400, 1510400),
        **policy(4, "4 5", "schedutil", 729600, 1510400, 1510400), **zones(("cpu-thermal", 46937), ("gpu-thermal", 46000), ("tj-thermal", 47000)),
        "sys/class/hwmon/hwmon3/name": "soctherm_oc", "sys/class/hwmon/hwmon3/oc1_event_cnt": 0, "sys/class/hwmon/hwmon3/oc3_event_cnt": 4,
        "sys/kernel/debug/bpmp/debug/clk/emc/rate": 2133000000, "sys/kernel/debug/bpmp/debug/clk/emc/max_rate": 2133000000}
PC = {**COMMON, "sys/devices/virtual/dmi/id/product_name": "ThinkStation", "proc/cpuinfo": "model name\t: Ryzen",
      "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": 3, "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": 9}


def test_raspberry_pi_4(tmp_path):
    root = lay_out(tmp_path, PI4)
    found = telemetry.snapshot(root)
    assert found["board"] == "Raspberry Pi 4 Model B Rev 1.4" and found["kernel"] == "6.6.31"
    assert found["clusters"] == [{"name": "policy0", "cpus": "0 1 2 3", "governor": "ondemand", "mhz": 1500, "limit_mhz": 1500, "max_mhz": 1500}]
    assert found["temperatures"] == {"cpu-thermal": 61.835} and found["memory_clock"] is None
    assert found["throttling"] == {"now": ["under-voltage", "throttled", "rpi_volt too low"], "firmware": "0x50005", "counts": {
        "firmware: under-voltage": 1, "firmware: frequency capped": 0, "firmware: throttled": 1, "firmware: soft temperature limit": 0}}
    said = telemetry.advice(found)
    assert any("governor ondemand" in s for s in said) and "held down now: throttled" in said and "firmware: under-voltage has happened since boot" in said


def test_raspberry_pi_5(tmp_path):
    found = telemetry.snapshot(lay_out(tmp_path, PI5))
    assert found["board"] == "Raspberry Pi 5 Model B Rev 1.0"
    assert found["throttling"]["now"] == [] and found["throttling"]["firmware"] == "0x0" and set(found["throttling"]["counts"].values()) == {0}
    assert telemetry.advice(found) == []


def test_rk3588(tmp_path):
    found = telemetry.snapshot(lay_out(tmp_path, RK3588))
    assert [(c["name"], c["cpus"], c["mhz"], c["max_mhz"]) for c in found["clusters"]] == [
        ("policy0", "0 1 2 3", 1800, 1800), ("policy4", "4 5", 2256, 2400), ("policy6", "6 7", 2304, 2304)]
    assert found["memory_clock"] == {"name": "dmc", "governor": "dmc_ondemand", "mhz": 528, "max_mhz": 2112}
    assert found["temperatures"]["bigcore1-thermal"] == 58.0 and len(found["temperatures"]) == 4
    assert found["throttling"] == {"now": ["thermal-cpufreq-1 cooled by 2"], "counts": {}, "firmware": None}
    assert any(s.startswith("memory (dmc): governor dmc_ondemand") for s in telemetry.advice(found))


def test_jetson_orin(tmp_path):
    found = telemetry.snapshot(lay_out(tmp_path, ORIN))
    assert found["throttling"]["counts"] == {"oc1_event_cnt": 0, "oc3_event_cnt": 4}
    assert found["memory_clock"] == {"name": "emc", "governor": None, "mhz": 2133, "max_mhz": 2133}
    assert [c["mhz"] for c in found["clusters"]] == [1510, 729]


def test_pc(tmp_path):
    found = telemetry.snapshot(lay_out(tmp_path, PC))
    assert found["board"] == "ThinkStation" and found["throttling"]["counts"] == {"core_throttle_count": 9}
    assert found["memory"] == {"total": 8000000 << 10, "available": 7000000 << 10, "swap_total": 102400 << 10, "swap_free": 102400 << 10}
    assert found["counters"] == {"pgmajfault": 7, "pswpin": 10, "pswpout": 20, "process_swap": 0}


@pytest.mark.parametrize("missing", sorted({**PI4, **RK3588, **ORIN, **PC}))
def test_any_file_may_be_missing_or_senseless(tmp_path, missing):
    everything = {**PI4, **RK3588, **ORIN, **PC}
    whole = telemetry.snapshot(lay_out(tmp_path / "whole", everything))
    for i, content in enumerate((None, b"", b"\xff\xfe what: is -this\0", "-1")):
        files = {k: v for k, v in everything.items() if k != missing}
        root = lay_out(tmp_path / str(i), files if content is None else {**files, missing: content})
        found = telemetry.snapshot(root)
        assert set(found) == set(whole)
        json.dumps(found)
        assert isinstance(telemetry.advice(found), list) and isinstance(telemetry.marks(whole, found), list)


def test_a_machine_that_says_nothing(tmp_path):
    found = telemetry.snapshot(str(tmp_path), str(tmp_path / "model"))
    assert found["board"] is None and found["clusters"] == [] and found["temperatures"] == {} and found["storage"] is None
    assert found["throttling"] == {"now": [], "counts": {}, "firmware": None} and telemetry.advice(found) == [] and telemetry.marks(found, found) == []


def test_this_machine(tmp_path):
    found = telemetry.snapshot(path=str(tmp_path))
    json.dumps(found)
    assert found["kernel"] == os.uname().release and found["memory"]["total"] > 0 and found["page_bytes"] == os.sysconf("SC_PAGE_SIZE")
    assert telemetry.marks(found, found) == [f"throttled: {text}" for text in found["throttling"]["now"]]


@pytest.mark.parametrize("change, expected", [
    ({}, []), ({"proc/vmstat": "pswpin 10\npswpout 100"}, ["swapped: 80 pages"]), ({"proc/vmstat": "pswpin 10\npswpout 21"}, []),
    ({"proc/self/status": "VmSwap:\t     128 kB"}, ["swapped: this process"]),
    ({"sys/class/hwmon/hwmon3/oc3_event_cnt": 5}, ["throttled: oc3_event_cnt"]),
    ({"sys/devices/platform/soc/soc:firmware/get_throttled": "40000"}, ["throttled: firmware: throttled"]),  # came and went between the readings
    ({"sys/devices/platform/soc/soc:firmware/get_throttled": "20002"}, ["throttled: frequency capped", "throttled: firmware: frequency capped"]),
    ({"sys/class/thermal/cooling_device1/type": "thermal-cpufreq-1", "sys/class/thermal/cooling_device1/cur_state": 2}, ["throttled: thermal-cpufreq-1 cooled by 2"]),
    ({"sys/class/thermal/cooling_device1/type": "pwm-fan", "sys/class/thermal/cooling_device1/cur_state": 2}, [])])
def test_marks(tmp_path, change, expected):
    calm = {**COMMON, "sys/class/hwmon/hwmon3/oc3_event_cnt": 4, "sys/devices/platform/soc/soc:firmware/get_throttled": "0"}
    before, after = telemetry.moving(lay_out(tmp_path / "a", calm)), telemetry.moving(lay_out(tmp_path / "b", {**calm, **change}))
    assert telemetry.marks(before, after) == expected


@pytest.mark.parametrize("device, files, kind", [
    ("mmcblk0", {"mmcblk0p2/partition": 2, "device/type": "SD"}, "SD card"), ("mmcblk1", {"mmcblk1p1/partition": 1, "device/type": "MMC"}, "eMMC"),
    ("nvme0n1", {"nvme0n1p1/partition": 1}, "NVMe"), ("sda", {"sda1/partition": 1, "queue/rotational": 1}, "disk"),
    ("sda", {"queue/rotational": 0}, "SSD"), ("vda", {"vda1/partition": 1}, "virtual disk"), ("usb2/2-1/sdb", {"sdb1/partition": 1}, "USB")])
def test_storage(tmp_path, device, files, kind):
    """The link of /sys/dev/block leads to the partition, the kind stands at its parent."""
    base = f"sys/devices/{device}"
    lay_out(tmp_path, {base: None, **{f"{base}/{name}": value for name, value in files.items()}})
    target = next((os.path.dirname(name) for name in files if name.endswith("/partition")), "")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/179:2").symlink_to(tmp_path / base / target)
    assert telemetry.storage("unused", str(tmp_path), (179, 2)) == {"device": os.path.basename(device), "kind": kind}
    assert telemetry.storage("unused", str(tmp_path), (0, 40)) is None
