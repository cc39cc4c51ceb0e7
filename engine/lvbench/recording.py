"""Fetches a session's recording from a server, straight to disk.

Works on a session that still runs: what has been recorded so far is judged. Knows the one address it asks, nothing of
the server's inside.
"""

from pathlib import Path

import httpx

TIMEOUT_S = 60.0


class RecordingUnavailable(RuntimeError):
    """The server has no such recording or cannot be reached."""


def download_recording(server: str, session: str, token: str | None, folder: Path) -> Path:
    """Writes `folder`/SESSION.mp4 and returns it."""
    url = f"{server.rstrip('/')}/v1/sessions/{session}/recording.mp4"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    path = folder / f"{Path(session).name}.mp4"
    try:
        with httpx.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as answer, path.open("wb") as file:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise RecordingUnavailable(
                    f"{url}: expected a recording, got {answer.status_code}: {answer.text[:300]}"
                )
            for piece in answer.iter_bytes():
                file.write(piece)
    except httpx.HTTPError as error:
        raise RecordingUnavailable(f"{url}: expected an answer, got: {error or type(error).__name__}") from error
    return path
