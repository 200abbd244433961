"""Record the report's target slider as docs/images/slider.gif: the table follows the target.

    keel demo
    python tools/report_animation.py runs/demo/report.html

Requires Chromium, and the extras `dev` and `vision` (playwright, pillow).
"""

import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "slider.gif"
WIDTH, HEIGHT = 900, 340
"""The part of the page that is shown: the slider, and the table below it."""
FRAMES = 16
MILLISECONDS = 220
PAUSE = 1200
"""How long the first and the last frame stay, in milliseconds."""
SET_TARGET = """(input, value) => {
    input.value = value;
    input.dispatchEvent(new Event("input"));
}"""


def frames(page: Page) -> list[Image.Image]:
    """Move the slider from its lowest useful target to the highest one, and return a picture of each step."""
    slider = page.locator(".target input").first
    slider.scroll_into_view_if_needed()
    top = (slider.bounding_box() or {"y": 0.0})["y"] - 20
    shown = {"x": 0, "y": top, "width": WIDTH, "height": HEIGHT}
    highest = float(slider.get_attribute("max") or 0)
    lowest = max(float(slider.get_attribute("min") or 0), 0.75 * highest)
    pictures = []
    for number in range(FRAMES):
        slider.evaluate(SET_TARGET, lowest + (highest - lowest) * number / (FRAMES - 1))
        page.wait_for_timeout(50)
        pictures.append(
            Image.open(BytesIO(page.screenshot(clip=shown))).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
        )
    return pictures


def record(report: Path) -> None:
    """Write the animation of a report."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": 2 * HEIGHT}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        page.wait_for_timeout(1000)
        first, *others = frames(page)
        browser.close()
    durations = [PAUSE, *[MILLISECONDS] * (len(others) - 1), PAUSE]
    first.save(IMAGE, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
