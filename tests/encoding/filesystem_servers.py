"""Filesystems of this machine behind the protocols of others: WebHDFS as Hadoop documents it, and SFTP."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl


class NameNode:
    """WebHDFS over a folder, name node and data node in one: a WSGI application.

    https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
    """

    def __init__(self, folder: Path, token: str) -> None:
        self._folder, self._token = folder, token

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        path = self._path(environ["PATH_INFO"].removeprefix("/webhdfs/v1"))
        status, headers, content = "200 OK", [("Content-Type", "application/json")], b""
        if query.get("delegation") != self._token:
            status, content = "401 Unauthorized", _exception("SecurityException", f"{query} is not signed in")
        elif query["op"] in ("CREATE", "APPEND", "OPEN") and "datanode" not in query:
            # Contents go to and come from a data node, whose address the name node tells.
            place = f"http://{environ['HTTP_HOST']}{environ['REQUEST_URI']}&datanode=true"
            status, headers = "307 Temporary Redirect", [("Location", place)]
        else:
            try:
                content = self._done(query, path, body)
            except (FileNotFoundError, NotADirectoryError):
                status, content = "404 Not Found", _exception("FileNotFoundException", f"File does not exist: {path}")
            except FileExistsError:
                status, content = "403 Forbidden", _exception("FileAlreadyExistsException", f"{path} exists")
        start_response(status, [*headers, ("Content-Length", str(len(content)))])
        return [content]

    def _path(self, text: str) -> Path:
        return self._folder / text.strip("/")

    def _done(self, query: dict[str, str], path: Path, body: bytes) -> bytes:
        operation = query["op"]
        if operation == "GETFILESTATUS":
            return json.dumps({"FileStatus": _status(path, "")}).encode()
        if operation == "LISTSTATUS":
            found = [_status(path, "")] if path.is_file() else [_status(item, item.name) for item in path.iterdir()]
            return json.dumps({"FileStatuses": {"FileStatus": found}}).encode()
        if operation == "OPEN":
            begin = int(query.get("offset", 0))
            return path.read_bytes()[begin:][: int(query.get("length", 1 << 60))]
        if operation in ("CREATE", "APPEND"):
            if operation == "CREATE":
                path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb" if operation == "CREATE" else "r+b") as file:
                file.seek(0, os.SEEK_END)
                file.write(body)
            return b""
        if operation == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
            return _boolean(True)
        if operation == "RENAME":
            return _boolean(_rename(path, self._path(query["destination"])))
        assert operation == "DELETE", operation
        is_there = path.exists()
        if is_there:
            path.rmdir() if path.is_dir() else path.unlink()
        return _boolean(is_there)


def _rename(old: Path, new: Path) -> bool:
    """Rename as HDFS does: not to a name that is taken."""
    try:
        os.link(old, new)
    except OSError:
        return False
    old.unlink()
    return True


def _status(path: Path, suffix: str) -> dict[str, Any]:
    found = path.stat()
    return {
        "length": found.st_size,
        "modificationTime": int(found.st_mtime * 1000),
        "pathSuffix": suffix,
        "type": "DIRECTORY" if path.is_dir() else "FILE",
    }


def _boolean(value: bool) -> bytes:
    return json.dumps({"boolean": value}).encode()


def _exception(name: str, message: str) -> bytes:
    return json.dumps({"RemoteException": {"exception": name, "message": message}}).encode()


@contextmanager
def sftp_server(folder: Path, password: str) -> Iterator[str]:
    """Serve a folder by SFTP to the user `tester`, and yield the address."""
    import asyncssh

    connections: list[Any] = []

    class Server(asyncssh.SSHServer):
        def connection_made(self, conn: Any) -> None:
            connections.append(conn)

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, given: str) -> bool:
            return (username, given) == ("tester", password)

    class Files(asyncssh.SFTPServer):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel, chroot=os.fsencode(folder))

        def rename(self, oldpath: bytes, newpath: bytes) -> None:
            """Fail where the name is taken, as draft-ietf-secsh-filexfer-02 says and OpenSSH does."""
            old, new = (Path(os.fsdecode(self.map_path(path))) for path in (oldpath, newpath))
            if not _rename(old, new):
                raise asyncssh.SFTPFailure("Failure")

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def listen() -> Any:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Server,
            sftp_factory=Files,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        )

    server = asyncio.run_coroutine_threadsafe(listen(), loop).result(30)

    async def end() -> None:
        server.close()
        for connection in connections:
            connection.abort()
            await connection.wait_closed()
        await server.wait_closed()
        await asyncio.sleep(0.1)  # transports close in the turn after

    try:
        yield f"sftp://127.0.0.1:{server.get_port()}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
