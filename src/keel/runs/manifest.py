"""The checksums of the files of a run that are written when it starts, and a copy of its spec."""

from dataclasses import dataclass, field
from hashlib import file_digest, sha256
from pathlib import Path

from keel.runs.files import write_atomic
from keel.runs.sealed import damaged, opened, read_sealed, seal

FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The files of a run folder with their checksums. While a file is replaced it may have its old or its new one."""

    spec: str
    files: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def write(cls, folder: Path, names: list[str]) -> None:
        """Write the manifest of a folder that is being created."""
        files = {name: [_file_sum(folder / name)] for name in names}
        manifest = cls((folder / "spec.toml").read_text(encoding="utf-8"), files)
        write_atomic(folder / FILE, [manifest._content()])

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """The manifest of a run folder; None in folders of earlier versions.

        Raises:
            DamagedFile: The manifest is not what was written.
        """
        if not (folder / FILE).exists():
            return None
        content = read_sealed(folder / FILE)
        if missing := {"spec", "files"} - content.keys():
            raise damaged(folder / FILE, f"{min(missing)} is missing")
        return cls(content["spec"], content["files"])

    def check(self, file: Path) -> None:
        """Raise a DamagedFile if the file is not what was written."""
        if _file_sum(file) not in self.files.get(file.name, []):
            raise damaged(file, "its checksum is wrong")

    def replace(self, file: Path, content: bytes, spec: str | None = None) -> "Manifest":
        """Replace a file and its checksum; a kill in between leaves a manifest that accepts both contents.

        Args:
            spec: The new copy of the spec, if it is the spec that is replaced.
        """
        new = sha256(content).hexdigest()
        both = Manifest(self.spec, {**self.files, file.name: [*self.files.get(file.name, []), new]})
        write_atomic(file.with_name(FILE), [both._content()])
        write_atomic(file, [content])
        after = Manifest(self.spec if spec is None else spec, {**self.files, file.name: [new]})
        write_atomic(file.with_name(FILE), [after._content()])
        return after

    def _content(self) -> bytes:
        return seal({"spec": self.spec, "files": self.files}, indent=2)


def _file_sum(file: Path) -> str:
    with opened(file) as stream:
        return file_digest(stream, "sha256").hexdigest()
