"""A headless Chromium without a network, driven by Debian's chromedriver."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = "chromium", "chromedriver"
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",
)


def missing() -> str:
    """The missing program, or nothing."""
    lacking = [name for name in (CHROMIUM, DRIVER) if shutil.which(name) is None]
    return f"there is no {' and no '.join(lacking)} (Debian: chromium, chromium-driver)" * bool(
        lacking
    )


@contextmanager
def browser(width: int, height: int) -> Iterator[Any]:  # Any: selenium is imported where it is
    """A window of that size; every request fails, except requests for files."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which(CHROMIUM))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for option in (*OPTIONS, f"--window-size={width},{height}"):
        options.add_argument(option)
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which(DRIVER))))
    try:
        driver.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        resized(driver, width, height)
        yield driver
    finally:
        driver.quit()


def resized(driver: Any, width: int, height: int = 900) -> None:  # Any: as above
    """Give the window another size."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(driver: Any, scheme: str) -> None:  # Any: as above
    """Let the system prefer the `light` or the `dark` scheme."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def screenshot(driver: Any, path: Path) -> None:  # Any: as above
    """The whole page, also what is below the window."""
    import base64

    whole = {"captureBeyondViewport": True, "format": "png"}
    height = driver.execute_script("return document.documentElement.scrollHeight")
    width = driver.execute_script("return document.documentElement.clientWidth")
    whole["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", whole)["data"])
    )
