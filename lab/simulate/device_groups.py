"""The devices of a study: their pass times, memory and links, as groups of a scenario."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lab.simulate.devices import HostConfig
from lab.simulate.fit import pass_time_from_trace
from lab.simulate.pass_times import LinearPassTime, PassTime, RooflinePassTime
from lab.simulate.scenario import DEFAULT_PAGES, DeviceGroup, Mode
from specserve.config.fields import integer, number, section, setting, subsection, text
from specserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """A group of devices: its pass times, given in one of three ways, and its link."""

    seconds: LinearPassTime | None = setting(None, section(LinearPassTime))
    roofline: RooflinePassTime | None = setting(None, section(RooflinePassTime))
    trace: str | None = setting(None, text())  # file from GET /trace of a running engine
    link_us: float = setting(0.0, number(0, 1e9))  # one way
    # Pages of the KV cache; by default what a roofline's memory holds, else DEFAULT_PAGES.
    pages: int | None = setting(None, integer(1, 2**31))

    @property
    def num_pass_times(self) -> int:
        """Number of ways in which the pass times are given, which should be 1."""
        return sum(way is not None for way in (self.seconds, self.roofline, self.trace))


@dataclass(frozen=True, slots=True)
class DevicesConfig:
    """Devices of one replica."""

    target: DeviceConfig = subsection(DeviceConfig)
    draft: DeviceConfig | None = setting(None, section(DeviceConfig))
    # Both in the mode `together`, where their passes take other times than in the other modes.
    target_together: DeviceConfig | None = setting(None, section(DeviceConfig))
    draft_together: DeviceConfig | None = setting(None, section(DeviceConfig))
    host: HostConfig = subsection(HostConfig)
    startup_s: float = setting(60.0, number(0, 1e6))

    @property
    def by_name(self) -> dict[str, DeviceConfig]:
        """Device groups that are given."""
        groups = {
            "target": self.target,
            "draft": self.draft,
            "target_together": self.target_together,
            "draft_together": self.draft_together,
        }
        return {name: group for name, group in groups.items() if group is not None}


def device_groups(
    devices: DevicesConfig,
    mode: Mode,
    directory: Path,
    *,
    page_size: int,
    num_devices: tuple[int, int | None] | None = None,
) -> tuple[DeviceGroup, DeviceGroup | None]:
    """Return the target's devices and the draft's, if it has any or the target's.

    `num_devices` of target and draft overrides the number in their rooflines; None for the draft
    alone leaves its own. Raises ConfigError where a model does not fit its memory.
    """
    given, together = devices.by_name, mode is Mode.TOGETHER
    num_target, num_draft = num_devices or (None, None)
    target_name, draft_name = (
        f"{role}_together" if together and f"{role}_together" in given else role
        for role in ("target", "draft")
    )
    target = _device_group(
        given[target_name], target_name, directory, page_size=page_size, num_devices=num_target
    )
    if draft_name not in given or num_draft == 0:
        return target, None
    draft = _device_group(
        given[draft_name], draft_name, directory, page_size=page_size, num_devices=num_draft
    )
    if not together:
        return target, draft
    shared = _shared_pages(target.pass_time, draft.pass_time, target_name, page_size=page_size)
    return (
        replace(target, pages=given[target_name].pages or min(target.pages, shared)),
        replace(draft, pages=given[draft_name].pages or min(draft.pages, shared)),
    )


def _shared_pages(target: PassTime, draft: PassTime, name: str, *, page_size: int) -> int:
    """Return the pages of either of two models in the target's memory."""
    if not isinstance(target, RooflinePassTime) or not isinstance(draft, RooflinePassTime):
        return DEFAULT_PAGES
    pages = target.positions(beside=draft) // page_size
    if pages < 1:
        raise ConfigError(f"devices.{name}: the memory does not hold the draft's weights as well")
    return pages


def _device_group(
    device: DeviceConfig, name: str, directory: Path, *, page_size: int, num_devices: int | None
) -> DeviceGroup:
    roofline = device.roofline
    if roofline is not None and num_devices is not None:
        roofline = replace(roofline, devices=num_devices)
    pages = (
        DEFAULT_PAGES if roofline is None else min(DEFAULT_PAGES, roofline.positions() // page_size)
    )
    if roofline is not None and pages < 1:
        raise ConfigError(
            f"devices.{name}: the memory ({roofline.devices} x {roofline.memory_gb:g} GB) "
            "does not hold the weights and a cache"
        )
    return DeviceGroup(
        pass_time=roofline or _pass_time(device, name, directory),
        link_s=device.link_us * 1e-6,
        pages=device.pages or pages,
        num_devices=roofline.devices if roofline else 1,
    )


def _pass_time(device: DeviceConfig, name: str, directory: Path) -> PassTime:
    if device.trace is not None:
        return pass_time_from_trace(directory / device.trace, name.removesuffix("_together"))
    assert device.seconds is not None, "load_study requires one of the three"
    return device.seconds
