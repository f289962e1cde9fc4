"""On which machine: a device of the table, or this one as it was measured."""

import json
from pathlib import Path
from typing import Any

from kvire.core.cache_folder import cache_folder, write_json
from kvire.core.errors import ConfigError
from kvire.plan.calibration import measured_machine
from kvire.plan.hardware import Machine, machine
from kvire.plan.tiers import Tier, presets

TITLES = {"memory": "this machine's memory tier", "disk": "this machine's disk tier"}
STATES = {"memory": "R", "disk": "D"}
PRESET = {"memory": "ram", "disk": "nvme4"}  # whose price is taken


def calibration_file() -> Path:
    """Where the last measurement of this machine is remembered."""
    return cache_folder() / "plan" / "calibration.json"


def choose_machine(
    model: str, options: dict[str, Any], kv_dtype: str, *, calibrate: bool
) -> tuple[Machine | None, tuple[Tier, ...]]:
    """The machine, and the tiers measured with it; (None, ()) where none was named."""
    if calibrate:
        from kvire.cli.plan_calibrate import measure  # noqa: PLC0415  (it loads torch)

        if options["hardware"] not in (None, "measured"):
            raise ConfigError("--calibrate measures this machine: leave --hardware out, or say measured")
        write_json(calibration_file(), measure(model, kv_dtype))
    if calibrate or options["hardware"] == "measured":
        if options["devices"] > 1 or options["mfu"] is not None:
            raise ConfigError("--devices and --mfu are for devices of the table: this machine was measured as it is")
        record = _remembered()
        try:
            return measured_machine(record), measured_tiers(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{calibration_file()} is damaged ({error!r}). Measure again: kvire plan MODEL --calibrate"
            ) from error
    if options["mfu"] is not None and options["hardware"] is None:
        raise ConfigError("--mfu is the share of a device's peak: say which device, with --hardware")
    if options["hardware"] is None:
        return None, ()
    return machine(options["hardware"], devices=options["devices"], mfu=options["mfu"]), ()


def measured_tiers(record: dict[str, Any]) -> tuple[Tier, ...]:
    """The tiers of a calibration file, with the prices of the table."""
    return tuple(
        Tier(
            name, TITLES[name], STATES[name], speed["bytes_per_s"], speed["latency_s"],
            usd_per_gb_month=presets()[PRESET[name]].usd_per_gb_month, measured=True,
            source=f"measured on {record['date']}",
        )
        for name in TITLES
        if (speed := record["tiers"].get(name)) is not None
    )  # fmt: skip


def _remembered() -> dict[str, Any]:
    path = calibration_file()
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("this machine was not measured yet: kvire plan MODEL --calibrate does it once") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Measure again: kvire plan MODEL --calibrate") from error
    return record
