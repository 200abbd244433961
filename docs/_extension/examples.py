"""The gallery: each script of examples/gallery with what it prints."""

from pathlib import Path

from _extension.running import Session, empty_folder

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"


def markdown(name: str) -> str:
    """Run a script, and return its output and its text."""
    code = (GALLERY / f"{name}.py").read_text(encoding="utf-8")
    with empty_folder():
        printed, _ = Session(f"{name}.py").run(code)
    body = code.partition('"""\n\n')[2]
    link = f"[{name}.py](../examples/gallery/{name}.py)"
    return f"{link} prints:\n\n```text\n{printed}\n```\n\n```python\n{body}```\n"
