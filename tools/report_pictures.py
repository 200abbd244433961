"""Draw the pictures of the demo's report in docs/images: its top in both themes, and its slider as an animation.

    keel demo
    python tools/report_pictures.py runs/demo/report.html

Requires Chromium, and the extras `dev` and `vision` (playwright, pillow).
"""

import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TOP = {"width": 1100, "height": 1375}
"""The part of the page in report-light.png and report-dark.png."""
WIDTH, HEIGHT = 900, 340
"""The part of the page in slider.gif: the slider, and the table below it."""
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


def draw_top(browser: Browser, report: Path) -> None:
    """Write the pictures of the top of a report."""
    for theme in ("light", "dark"):
        page = browser.new_page(viewport=TOP, color_scheme=theme)
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("[data-drawn=deviation]")
        page.screenshot(path=IMAGES / f"report-{theme}.png")
        page.close()


def record_slider(browser: Browser, report: Path) -> None:
    """Write the animation of the slider of a report."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 2 * HEIGHT}, color_scheme="light")
    page.goto(report.resolve().as_uri())
    page.wait_for_selector("[data-drawn=deviation]")
    first, *others = frames(page)
    durations = [PAUSE, *[MILLISECONDS] * (len(others) - 1), PAUSE]
    first.save(IMAGES / "slider.gif", save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


def main(report: Path) -> None:
    """Write all pictures of a report."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        draw_top(browser, report)
        record_slider(browser, report)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
