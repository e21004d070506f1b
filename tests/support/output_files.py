"""Files of the output of ranks, as the keepers of an agent write them."""

from __future__ import annotations

from pathlib import Path

from tessera.service.agent.logs import claim_folder, folder_of


class RankFiles:
    """The output files of one rank of a generation. ``rank`` is as in their names."""

    def __init__(
        self, logs: Path, job: str = "j", generation: int = 1, rank: str = "0", number: int = 0
    ) -> None:
        claim_folder(logs, job, number)
        self.folder, self._rank = folder_of(logs, job, generation), rank
        self.folder.mkdir(parents=True, exist_ok=True)
        self._written = self._first = 0
        self.rotate()

    @property
    def current(self) -> Path:
        """Return the newest file."""
        return self.file_at(self._first)

    def file_at(self, offset: int) -> Path:
        """Return the file that begins at a byte of the output."""
        return self.folder / f"rank-{self._rank}.{offset}.log"

    def write(self, data: bytes) -> None:
        """Append to the newest file."""
        with self.current.open("ab") as file:
            file.write(data)
        self._written += len(data)

    def rotate(self) -> None:
        """Begin another file."""
        self._first = self._written
        self.current.touch()

    def end(self) -> None:
        """Note that the rank has ended."""
        (self.folder / f"rank-{self._rank}.end").touch()


def rotated_output(files: RankFiles, data: bytes, file_bytes: int) -> None:
    """Write ``data`` in files of a size."""
    for begin in range(0, len(data), file_bytes):
        if begin:
            files.rotate()
        files.write(data[begin : begin + file_bytes])
