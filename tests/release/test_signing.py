"""A signature holds for the files that were signed, and for no others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from sigstore.errors import TUFError

from onnxtool.errors import InputError
from onnxtool.release.signing import SIGNATURE_NAME, sign, verify_signature
from tests.release.keys import write_keys


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    (folder / "chroma").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"weights")
    (folder / "chroma" / "vocab.txt").write_text("a\nb\n")
    return folder


@pytest.fixture
def signed(release: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A release with its signature, and the public key."""
    private, public = write_keys(tmp_path)
    sign(release, private)
    return release, public


def test_a_signed_release_is_verified(signed: tuple[Path, Path], tmp_path: Path) -> None:
    """Under another name as well, and signed again."""
    folder, public = signed
    verify_signature(folder, public)
    sign(folder, tmp_path / "release.key")
    verify_signature(folder.rename(tmp_path / "moved"), public)


def test_the_command_of_model_signing_accepts_it(signed: tuple[Path, Path]) -> None:
    """It is a signature of OpenSSF, which needs nothing of ours."""
    folder, public = signed
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder)]
    done = subprocess.run(
        [*command, "--signature", str(folder / SIGNATURE_NAME), "--public_key", str(public)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "Verification succeeded\n"), done.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b"weighty"), "Hash mismatch for 'model.onnx'"),
        (lambda folder: (folder / "chroma" / "vocab.txt").unlink(), "Missing files"),
        (lambda folder: (folder / "extra").write_text(""), "Extra files"),
        (lambda folder: (folder / "link").symlink_to("model.onnx"), "symlink|symbolic"),
        (lambda folder: (folder / SIGNATURE_NAME).unlink(), "there is no model.sig"),
        (lambda folder: (folder / SIGNATURE_NAME).write_bytes(b"\xff"), "utf-8"),
        (lambda folder: (folder / SIGNATURE_NAME).write_text("[" * 99_999), "nested more than"),
        (lambda folder: (folder / SIGNATURE_NAME).write_text("{}"), "dsseEnvelope"),
    ],
)
def test_a_changed_folder_is_not_verified(
    signed: tuple[Path, Path], change: Callable[[Path], object], reason: str
) -> None:
    """Whatever was changed is named."""
    folder, public = signed
    change(folder)
    with pytest.raises(InputError, match=f"does not hold: .*({reason})") as caught:
        verify_signature(folder, public)
    assert "Digest(" not in caught.value.message


def test_any_changed_byte_of_the_signature_is_found(signed: tuple[Path, Path]) -> None:
    """Also where what model-signing reads of it stays the same."""
    folder, public = signed
    path = folder / SIGNATURE_NAME
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        for bit in (1, 32):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(InputError, match="does not hold"):
                verify_signature(folder, public)
    path.write_bytes(whole + b"\n")
    with pytest.raises(InputError, match="it was edited"):
        verify_signature(folder, public)


def test_a_signature_of_another_key_is_not_verified(signed: tuple[Path, Path], tmp_path: Path) -> None:
    """Anybody can sign a folder."""
    folder, _ = signed
    (tmp_path / "others").mkdir()
    _, other = write_keys(tmp_path / "others")
    with pytest.raises(InputError, match="Key mismatch"):
        verify_signature(folder, other)


def test_a_key_may_have_a_password(release: Path, tmp_path: Path) -> None:
    """Without it, or with another one, it cannot be used."""
    private, public = write_keys(tmp_path, "secret")
    for password in ("", "wrong"):
        with pytest.raises(InputError, match="no private key to sign with"):
            sign(release, private, password=password)
    assert not (release / SIGNATURE_NAME).exists()
    sign(release, private, password="secret")  # noqa: S106
    verify_signature(release, public)


def test_what_is_no_key_is_refused(release: Path, tmp_path: Path) -> None:
    """With the command that makes one."""
    (tmp_path / "text").write_text("no key")
    key = rsa.generate_private_key(65537, 2048)
    (tmp_path / "rsa").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    for name in ("missing", "text", "rsa", "."):
        with pytest.raises(InputError, match="no private key to sign with") as raised:
            sign(release, tmp_path / name)
        assert "openssl ecparam" in raised.value.hint
    with pytest.raises(InputError, match="no public key to verify with"):
        verify_signature(release, tmp_path / "text")
    with pytest.raises(InputError, match="with a private key or with an identity token"):
        sign(release)
    with pytest.raises(InputError, match="with a public key, or with an identity"):
        verify_signature(release, identity="somebody@example.org")


def test_without_a_network_there_is_no_identity(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sigstore says so, and it is one error of ours."""

    def fail(*_: object, **__: object) -> None:
        raise TUFError("Failed to refresh TUF metadata")

    monkeypatch.setattr("model_signing.signing.Config.use_sigstore_signer", fail)
    monkeypatch.setattr("model_signing.verifying.Config.use_sigstore_verifier", fail)
    with pytest.raises(InputError, match="identity token cannot be used: Failed to refresh"):
        sign(release, identity_token="x")  # noqa: S106
    with pytest.raises(InputError, match="Sigstore cannot be used: Failed to refresh"):
        verify_signature(release, identity="a@example.org", issuer="https://example.org")


def test_a_missing_library_names_the_extra(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read."""
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(InputError) as raised:
        sign(release, tmp_path / "key")
    assert raised.value.hint == "pip install 'onnxtool-cli[release]'"
