"""Keys to sign releases with."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_keys(folder: Path, password: str = "") -> tuple[Path, Path]:
    """Write a private and a public key, and return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "release.key", folder / "release.pub"
    encryption = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public
